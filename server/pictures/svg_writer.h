// Writes one self-contained SVG: shapes with classes of one style sheet, text as text, no outside assets.
// Legible on a light and on a dark page.
#ifndef MESHFILL_SERVER_PICTURES_SVG_WRITER_H_
#define MESHFILL_SERVER_PICTURES_SVG_WRITER_H_

#include <string>

#include "absl/strings/string_view.h"

namespace meshfill {

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

// Lengths are in pixels. `classes` name rules of the style sheet in the source; several with spaces between.
class SvgWriter {
 public:
  void Rect(const Box& box, absl::string_view classes,
            absl::string_view fill = "");  // fill: "#rrggbb", or the class's
  void Line(double x1, double y1, double x2, double y2, absl::string_view classes);
  // `y` is the baseline. Classes "mid" and "end" anchor the text at its middle or end.
  void Text(double x, double y, absl::string_view text, absl::string_view classes = "", double size = 13);
  // Breaks the text into lines of `width`; returns the baseline of the line after the last.
  double Paragraph(double x, double y, double width, absl::string_view text, absl::string_view classes = "");

  // What is drawn until CloseGroup belongs together; viewers show `title` where the pointer rests.
  void OpenGroup(absl::string_view classes, absl::string_view title);
  void CloseGroup();

  // The whole file.
  std::string Finish(double width, double height, absl::string_view title) &&;

 private:
  std::string body_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_SVG_WRITER_H_
