#include "engine/mesh/placement.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {

std::string Grid::DebugString() const { return absl::StrCat(planes, "x", rows, "x", columns); }

Grid MeshGrid(int heads, Tile tile) { return {.planes = heads, .rows = tile.b, .columns = tile.a}; }

Placement RowFirst(int ranks) {
  Placement placement{.seat_of_rank = std::vector<int>(ranks), .name = "row-first"};
  std::iota(placement.seat_of_rank.begin(), placement.seat_of_rank.end(), 0);
  return placement;
}

Placement Boxed(Grid grid, Grid box) {
  Placement placement{.seat_of_rank = std::vector<int>(grid.ranks()),
                      .name = absl::StrCat("box ", box.DebugString())};
  const Grid nodes{.planes = grid.planes / box.planes,
                   .rows = grid.rows / box.rows,
                   .columns = grid.columns / box.columns};
  for (int i = 0; i < grid.planes; ++i) {
    for (int y = 0; y < grid.rows; ++y) {
      for (int x = 0; x < grid.columns; ++x) {
        const int node = nodes.Rank(i / box.planes, y / box.rows, x / box.columns);
        const int place = box.Rank(i % box.planes, y % box.rows, x % box.columns);
        placement.seat_of_rank[grid.Rank(i, y, x)] = node * box.ranks() + place;
      }
    }
  }
  return placement;
}

std::vector<Placement> PlacementsOf(Grid grid, int seats_per_node) {
  std::vector<Placement> placements = {RowFirst(grid.ranks())};
  const int size = std::min(seats_per_node, grid.ranks());
  for (int planes = 1; planes <= size; ++planes) {
    for (int rows = 1; planes * rows <= size; ++rows) {
      const int columns = size / (planes * rows);
      if (planes * rows * columns != size || grid.planes % planes != 0 || grid.rows % rows != 0 ||
          grid.columns % columns != 0) {
        continue;
      }
      Placement boxed = Boxed(grid, {.planes = planes, .rows = rows, .columns = columns});
      if (boxed.seat_of_rank != placements.front().seat_of_rank) placements.push_back(std::move(boxed));
    }
  }
  return placements;
}

}  // namespace meshfill
