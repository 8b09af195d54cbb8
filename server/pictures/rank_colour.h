// One colour for each rank, the same in every picture.
#ifndef MESHFILL_SERVER_PICTURES_RANK_COLOUR_H_
#define MESHFILL_SERVER_PICTURES_RANK_COLOUR_H_

#include <string>

namespace meshfill {

std::string RankColour(int rank);  // "#rrggbb", light enough for dark text

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_RANK_COLOUR_H_
