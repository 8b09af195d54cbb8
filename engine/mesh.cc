#include "engine/mesh.h"
