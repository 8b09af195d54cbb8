// Which seat of the pool runs which rank. A seat is a device's place in the pool, those of a node side by
// side.
//
// Ranks form a grid of three dimensions, rank = (y·columns + x)·planes + i: y is the Q group of a mesh, x the
// place in it and i the member of the head group, as in engine/run/head_exchange.h (so that Q rings run along
// x, KV rings along y, all-to-alls along i). A node holds a box of the grid; what runs along a side of the
// box stays inside the node:
//
//     8 seats a node, grid 1×4×16    box 1×1×8 (row first)      box 1×4×2
//                                    y0 |A A … A|B B … B|       y0 |A A|B B| … |H H|
//                                    y1 |C C … C|D D … D|       …
//                                                               y3 |A A|B B| … |H H|
#ifndef MESHFILL_ENGINE_MESH_PLACEMENT_H_
#define MESHFILL_ENGINE_MESH_PLACEMENT_H_

#include <string>
#include <vector>

#include "engine/mesh/mesh.h"

namespace meshfill {

struct Grid {
  int planes = 1;
  int rows = 1;
  int columns = 1;

  int ranks() const { return planes * rows * columns; }
  int Rank(int i, int y, int x) const { return (y * columns + x) * planes + i; }
  std::string DebugString() const;  // "2x4x8"
  bool operator==(const Grid&) const = default;
};

// The grid of the ranks of h meshes of a·b: n = h·a·b.
Grid MeshGrid(int heads, Tile tile);

struct Placement {
  std::vector<int> seat_of_rank;
  std::string name;  // "row-first", or "box 1x4x2": planes × rows × columns in a node

  bool operator==(const Placement&) const = default;
};

// Rank r in seat r, as the papers do.
Placement RowFirst(int ranks);

// `box` divides the grid in every dimension and fills a node.
Placement Boxed(Grid grid, Grid box);

// Row-first, and every box that fills a node of `seats_per_node` (or holds all ranks of a smaller grid).
std::vector<Placement> PlacementsOf(Grid grid, int seats_per_node);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_PLACEMENT_H_
