// The rings of a mesh beside every member of a head group: from whom each rank receives along Q and along KV.
#ifndef MESHFILL_ENGINE_SIM_MESH_RINGS_H_
#define MESHFILL_ENGINE_SIM_MESH_RINGS_H_

#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/sim/head_groups.h"

namespace meshfill::sim {

struct MeshRings {
  std::vector<int> q_from;   // [ranks]
  std::vector<int> kv_from;  // [ranks]
};

inline MeshRings MeshRingsOf(const HeadGroups& groups, Tile tile) {
  const Mesh mesh(tile);
  MeshRings one{.q_from = std::vector<int>(tile.ranks()), .kv_from = std::vector<int>(tile.ranks())};
  for (int rank = 0; rank < tile.ranks(); ++rank) {
    one.q_from[rank] = mesh.QReceiveFrom(rank);
    one.kv_from[rank] = mesh.KvReceiveFrom(rank);
  }
  return {.q_from = groups.InEveryMesh(one.q_from), .kv_from = groups.InEveryMesh(one.kv_from)};
}

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_MESH_RINGS_H_
