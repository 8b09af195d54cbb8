#include "engine/model/model_config.h"
