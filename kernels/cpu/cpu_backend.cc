#include "kernels/cpu/cpu_backend.h"
