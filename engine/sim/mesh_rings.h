// The rings of a mesh beside every member of a head group: from whom each rank receives along each.
#ifndef MESHFILL_ENGINE_SIM_MESH_RINGS_H_
#define MESHFILL_ENGINE_SIM_MESH_RINGS_H_

#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/sim/head_groups.h"

namespace meshfill::sim {

struct MeshRings {
  std::vector<int> q_from;              // [ranks]
  std::vector<int> kv_from;             // [ranks]
  std::vector<int> kv_outer_from = {};  // [ranks]; empty: KV goes round one ring
};

inline MeshRings MeshRingsOf(const HeadGroups& groups, Tile tile, int kv_inner = 0) {
  const Mesh mesh(tile, KvOrder::kRising, kv_inner);
  MeshRings one{.q_from = std::vector<int>(tile.ranks()),
                .kv_from = std::vector<int>(tile.ranks()),
                .kv_outer_from = std::vector<int>(kv_inner == 0 ? 0 : tile.ranks())};
  for (int rank = 0; rank < tile.ranks(); ++rank) {
    one.q_from[rank] = mesh.QReceiveFrom(rank);
    one.kv_from[rank] = mesh.KvReceiveFrom(rank);
    if (kv_inner != 0) one.kv_outer_from[rank] = mesh.KvOuterReceiveFrom(rank);
  }
  MeshRings all{.q_from = groups.InEveryMesh(one.q_from), .kv_from = groups.InEveryMesh(one.kv_from)};
  if (kv_inner != 0) all.kv_outer_from = groups.InEveryMesh(one.kv_outer_from);
  return all;
}

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_MESH_RINGS_H_
