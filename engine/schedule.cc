#include "engine/schedule.h"
