#include "server/pictures/assignment_picture.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "engine/mesh/mesh.h"
#include "server/pictures/rank_colour.h"

namespace meshfill {
namespace {

constexpr double kLargestCell = 44;
constexpr double kMatrixSide = 640;   // largest side of the matrix
constexpr double kNumberedCell = 24;  // cells of this size have a number each, smaller ones one for each tile
constexpr double kIndexedCell = 34;   // from this size on the chosen tile shows its local indices, too
constexpr double kAxis = 44;          // room for the chunks' numbers
constexpr double kSmallestText = 5;
constexpr double kSmallestGrid = 3;   // cells smaller than this have no lines between them
constexpr int kMostChunks = 20;       // most chunks that a list names one by one
constexpr double kDigitWidth = 0.62;  // width of a digit, in parts of the text's size

// The matrix's columns are ordered by KV group, so that every rank's tile is in one piece.
class AssignmentPicture {
 public:
  AssignmentPicture(const Plan& plan, double x, double y, double width, SvgWriter& svg)
      : plan_(plan),
        mesh_(plan.tile, KvOrder::kRising, plan.kv_inner),
        a_(plan.tile.a),
        b_(plan.tile.b),
        ranks_(plan.tile.ranks()),
        chosen_(b_ / 2 * a_ + a_ / 2),
        cell_(std::min(kLargestCell, kMatrixSide / ranks_)),
        left_(x + kAxis),
        top_(y + kAxis),
        right_(x + width),
        svg_(svg) {}

  double Draw() {
    for (int rank = 0; rank < ranks_; ++rank) DrawTile(rank);
    DrawCells();
    DrawChosen();
    DrawAxes();
    const double words = Explain(left_ + Side() + 40, top_ + 14);
    return std::max(top_ + Side(), words);
  }

 private:
  double Side() const { return cell_ * ranks_; }
  int ChunkOfColumn(int column) const { return column / b_ + a_ * (column % b_); }
  int ColumnOf(int kv_chunk) const { return kv_chunk % a_ * b_ + kv_chunk / a_; }
  // The pool's number of a rank of the first mesh.
  int PoolRank(int rank) const { return rank * plan_.heads; }
  Box TileOf(int rank) const {
    const int q_group = rank / a_, kv_group = rank % a_;
    return {.x = left_ + kv_group * b_ * cell_,
            .y = top_ + q_group * a_ * cell_,
            .width = b_ * cell_,
            .height = a_ * cell_};
  }

  void DrawTile(int rank) {
    const Box box = TileOf(rank);
    const std::string number = absl::StrCat(PoolRank(rank));
    svg_.OpenGroup("rank", absl::StrCat("rank ", number, ": Q ", QChunks(rank), "; KV ", KvChunks(rank)));
    svg_.Rect(box, "tile", RankColour(PoolRank(rank)));
    const double size = std::min(
        {18.0, box.height * 0.9, box.width * 0.9 / (kDigitWidth * static_cast<double>(number.size()))});
    if (cell_ < kNumberedCell && size >= kSmallestText) {
      svg_.Text(box.x + box.width / 2, box.y + box.height / 2 + 0.36 * size, number, "mid on-colour", size);
    }
    svg_.CloseGroup();
  }

  void DrawCells() {
    for (int i = 1; i < ranks_ && cell_ >= kSmallestGrid; ++i) {
      svg_.Line(left_ + i * cell_, top_, left_ + i * cell_, top_ + Side(), "grid");
      svg_.Line(left_, top_ + i * cell_, left_ + Side(), top_ + i * cell_, "grid");
    }
    if (cell_ < kNumberedCell) return;
    for (int row = 0; row < ranks_; ++row) {
      for (int column = 0; column < ranks_; ++column) {
        const int owner = mesh_.Owner(row, ChunkOfColumn(column));
        if (owner == chosen_ && cell_ >= kIndexedCell) continue;
        CellText(row, column, absl::StrCat(PoolRank(owner)), 12);
      }
    }
  }

  void DrawChosen() {
    svg_.Rect(TileOf(chosen_), "chosen");
    if (cell_ < kIndexedCell) return;
    for (int u = 0; u < a_; ++u) {
      for (int v = 0; v < b_; ++v) {
        const int row = mesh_.QChunk(chosen_, u), column = ColumnOf(mesh_.KvChunk(chosen_, v));
        CellText(row, column, absl::StrCat("(", u, ",", v, ")"), 12, "mid on-colour bold");
      }
    }
  }

  void CellText(int row, int column, absl::string_view text, double size,
                absl::string_view classes = "mid on-colour") {
    svg_.Text(left_ + (column + 0.5) * cell_, top_ + (row + 0.5) * cell_ + 0.36 * size, text, classes, size);
  }

  void DrawAxes() {
    const double size = std::clamp(cell_ * 0.62, kSmallestText, 12.0);
    const int every = static_cast<int>(std::ceil(kSmallestText / (cell_ * 0.62)));
    const auto style = [this](int chunk, bool q) {
      const bool needed = q ? chunk / a_ == chosen_ / a_ : chunk % a_ == chosen_ % a_;
      return std::string(needed ? "bold" : "muted");
    };
    for (int i = 0; i < ranks_; i += every) {
      const int kv_chunk = ChunkOfColumn(i);
      svg_.Text(left_ - 6, top_ + (i + 0.5) * cell_ + 0.36 * size, absl::StrCat(i),
                absl::StrCat("end ", style(i, true)), size);
      svg_.Text(left_ + (i + 0.5) * cell_, top_ - 6, absl::StrCat(kv_chunk),
                absl::StrCat("mid ", style(kv_chunk, false)), size);
    }
    svg_.Text(left_, top_ - 26, "KV chunks, by KV group →", "muted", 12);
    svg_.Text(left_ - kAxis, top_ - 6, "Q ↓", "muted", 12);
  }

  // Chunks in the order in which they arrive, which is that of the local indices.
  std::string QChunks(int rank) const { return Chunks(rank, a_, &Mesh::QChunk); }
  std::string KvChunks(int rank) const { return Chunks(rank, b_, &Mesh::KvChunk); }
  std::string Chunks(int rank, int count, int (Mesh::*chunk)(int, int) const) const {
    std::vector<int> chunks;
    chunks.reserve(count);
    for (int i = 0; i < count; ++i) chunks.push_back((mesh_.*chunk)(rank, i));
    if (count <= kMostChunks) return absl::StrJoin(chunks, ", ");
    return absl::StrCat(chunks[0], ", ", chunks[1], ", ", chunks[2], " … ", chunks.back(), " (", count, ")");
  }

  double Explain(double x, double y) {
    const double width = right_ - x;
    const auto paragraph = [&](const std::string& text, absl::string_view classes = "") {
      y = svg_.Paragraph(x, y, width, text, classes) + 8;
    };
    const int rank = PoolRank(chosen_);
    paragraph(absl::StrCat(
        "Every cell is a block: the attention of one Q chunk with one KV chunk. Its number and colour "
        "say which rank computes it. Each rank has a tile of ",
        a_, " × ", b_, " blocks."));
    paragraph(absl::StrCat("Rank ", rank, " (outlined)"), "bold");
    paragraph(absl::StrCat("holds Q ", chosen_, " and KV ", chosen_, " from the start: block (0,0)."));
    if (a_ > 1) {
      paragraph(absl::StrCat(
          "Its rows Q#0 … Q#", a_ - 1, " are Q ", QChunks(chosen_), ": all but its own come from rank ",
          PoolRank(mesh_.QReceiveFrom(chosen_)), ", one after the other, and ",
          a_ == 2 ? "one partial output goes" : absl::StrCat(a_ - 1, " partial outputs go"),
          " back around the same ring."));
    }
    if (b_ > 1) {
      paragraph(absl::StrCat("Its columns KV#0 … KV#", b_ - 1, " are KV ", KvChunks(chosen_),
                             ": all but its own come from rank ", PoolRank(mesh_.KvReceiveFrom(chosen_)),
                             plan_.kv_inner == 0
                                 ? std::string()
                                 : absl::StrCat(", and the first of each ", plan_.kv_inner, " from rank ",
                                                PoolRank(mesh_.KvOuterReceiveFrom(chosen_))),
                             "."));
    }
    if (ranks_ > 1) {
      paragraph(absl::StrCat("Received in each layer: ", a_ - 1, " Q, ", b_ - 1, " KV, ", a_ - 1,
                             " partial outputs. A ring of ", ranks_, " receives ", ranks_ - 1, " KV."),
                "muted");
    }
    if (plan_.heads == 1) return y;
    paragraph(absl::StrCat("There are ", plan_.heads,
                           " meshes like this one, each with its share of the heads. Chunk i is of the ",
                           plan_.heads, " ranks ", plan_.heads, "i … ", plan_.heads, "i + ", plan_.heads - 1,
                           ", which trade tokens for heads before and back after; the k-th of them is in "
                           "mesh k. Numbers are "
                           "those of mesh 0."),
              "muted");
    return y;
  }

  const Plan& plan_;
  const Mesh mesh_;
  const int a_;
  const int b_;
  const int ranks_;   // ranks of the mesh
  const int chosen_;  // the rank whose tile is shown
  const double cell_;
  const double left_;  // left edge of the matrix
  const double top_;
  const double right_;  // right edge of the picture
  SvgWriter& svg_;
};

}  // namespace

double DrawAssignment(const Plan& plan, double x, double y, double width, SvgWriter& svg) {
  return AssignmentPicture(plan, x, y, width, svg).Draw();
}

}  // namespace meshfill
