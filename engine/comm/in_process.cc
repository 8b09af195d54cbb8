#include "engine/comm/in_process.h"
