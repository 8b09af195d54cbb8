#include "kernels/reference/reference_backend.h"
