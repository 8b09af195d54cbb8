// For builds with ThreadSanitizer, before protobuf's headers: they give map fields two more members under it, which Debian's
// libprotobuf, built without, knows nothing of. libstdc++ looks at the macro here, and keeps what it found.
#include <cstddef>
#undef __SANITIZE_THREAD__
