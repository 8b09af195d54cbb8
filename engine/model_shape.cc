#include "engine/model_shape.h"
