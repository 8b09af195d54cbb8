#include "kernels/peak.h"
