#include "engine/executor.h"
