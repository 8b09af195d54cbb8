#include "engine/model/rope.h"
