// What this binary calls itself, to people, clients and the other processes of a pool.
#ifndef MESHFILL_SERVER_OBSERVE_BUILD_NAME_H_
#define MESHFILL_SERVER_OBSERVE_BUILD_NAME_H_

namespace meshfill {

inline constexpr char kBuildName[] = "meshfill " MESHFILL_VERSION;  // CMakeLists.txt defines the version
extern const char kBuildCommit[];  // the 12 first digits of Git's hash; "unknown": built without Git

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_BUILD_NAME_H_
