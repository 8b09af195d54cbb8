#include "engine/planner.h"
