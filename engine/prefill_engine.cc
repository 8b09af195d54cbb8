#include "engine/prefill_engine.h"
