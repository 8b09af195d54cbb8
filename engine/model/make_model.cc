#include "engine/model/make_model.h"
