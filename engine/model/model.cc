#include "engine/model/model.h"
