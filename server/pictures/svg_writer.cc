#include "server/pictures/svg_writer.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

// Colours of things that mean the same on any page are plain rules; what depends on the page is repeated for
// dark ones.
constexpr absl::string_view kStyle = R"(
text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1c2128; }
.mid { text-anchor: middle; }
.end { text-anchor: end; }
.bold { font-weight: 600; }
.page { fill: #ffffff; }
.muted { fill: #59636e; }
.on-colour { fill: #14181d; }
.on-dark { fill: #ffffff; }
.rule { stroke: #d1d9e0; stroke-width: 1; }
.grid { stroke: #ffffff; stroke-width: 0.6; opacity: 0.7; }
.tile { stroke: #ffffff; stroke-width: 1.5; }
.chosen { fill: none; stroke: #14181d; stroke-width: 3; }
.absent { fill: #eef1f4; }
.ready { fill: #ffffff; stroke: #8b96a3; stroke-width: 0.8; }
.done { fill: #b9cbe0; }
.track { fill: #f4f6f8; }
.block { fill: #2f6db3; }
.work { fill: #8a99ab; }
.wait { fill: url(#stripes); }
.wait-text { fill: #b3261e; }
.recv_q { fill: #e3a008; }
.recv_kv { fill: #2f9e5b; }
.send_o { fill: #9a5fd0; }
.all_to_all { fill: #0f9aa8; }
.send_dq { fill: #c08be8; }
.send_dkv { fill: #d6568f; }
.gather { fill: #a0703c; }
.arriving { fill-opacity: 0.25; stroke-width: 1.4; }
.arriving.recv_q { stroke: #e3a008; }
.arriving.recv_kv { stroke: #2f9e5b; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #14181d; }
  .muted { fill: #9aa5b1; }
  .on-colour { fill: #14181d; }
  .on-dark { fill: #ffffff; }
  .rule { stroke: #3a434d; }
  .absent { fill: #20262d; }
  .ready { fill: #14181d; stroke: #77828e; }
  .done { fill: #3b5675; }
  .track { fill: #1c2229; }
  .block { fill: #3d7fca; }
  .wait-text { fill: #ff8a80; }
}
)";

constexpr absl::string_view kDefinitions = R"svg(<defs>
<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#f5b5ae"/><rect width="3" height="6" fill="#cf3b30"/>
</pattern>
</defs>)svg";

constexpr double kLineHeight = 20;
constexpr double kCharacterWidth = 6.6;  // width of a character of 13 pixels, the average and a little more

std::string Escape(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// `value` with at most two decimals: "12", "12.5".
std::string Number(double value) {
  std::string text = absl::StrFormat("%.2f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string Attribute(absl::string_view name, absl::string_view value) {
  return value.empty() ? "" : absl::StrCat(" ", name, "=\"", value, "\"");
}

std::string Attribute(absl::string_view name, double value) { return Attribute(name, Number(value)); }

}  // namespace

void SvgWriter::Rect(const Box& box, absl::string_view classes, absl::string_view fill) {
  absl::StrAppend(&body_, "<rect", Attribute("x", box.x), Attribute("y", box.y),
                  Attribute("width", box.width), Attribute("height", box.height), Attribute("class", classes),
                  Attribute("fill", fill), "/>\n");
}

void SvgWriter::Line(double x1, double y1, double x2, double y2, absl::string_view classes) {
  absl::StrAppend(&body_, "<line", Attribute("x1", x1), Attribute("y1", y1), Attribute("x2", x2),
                  Attribute("y2", y2), Attribute("class", classes), "/>\n");
}

void SvgWriter::Text(double x, double y, absl::string_view text, absl::string_view classes, double size) {
  absl::StrAppend(&body_, "<text", Attribute("x", x), Attribute("y", y), Attribute("font-size", size),
                  Attribute("class", classes), ">", Escape(text), "</text>\n");
}

double SvgWriter::Paragraph(double x, double y, double width, absl::string_view text,
                            absl::string_view classes) {
  const size_t columns = static_cast<size_t>(width / kCharacterWidth);
  std::string line;
  const auto end_line = [&] {
    if (!line.empty()) Text(x, y, line, classes);
    if (!line.empty()) y += kLineHeight;
    line.clear();
  };
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (line.size() + 1 + word.size() > columns) end_line();
    absl::StrAppend(&line, line.empty() ? "" : " ", word);
  }
  end_line();
  return y;
}

void SvgWriter::OpenGroup(absl::string_view classes, absl::string_view title) {
  absl::StrAppend(&body_, "<g", Attribute("class", classes), "><title>", Escape(title), "</title>\n");
}

void SvgWriter::CloseGroup() { absl::StrAppend(&body_, "</g>\n"); }

std::string SvgWriter::Finish(double width, double height, absl::string_view title) && {
  const std::string w = Number(width), h = Number(height);
  return absl::StrCat(R"(<?xml version="1.0" encoding="UTF-8"?>)", "\n",
                      R"(<svg xmlns="http://www.w3.org/2000/svg" role="img" width=")", w, "\" height=\"", h,
                      "\" viewBox=\"0 0 ", w, " ", h, "\">\n<title>", Escape(title), "</title>\n<style>",
                      kStyle, "</style>\n", kDefinitions, "\n<rect class=\"page\" width=\"", w,
                      "\" height=\"", h, "\"/>\n", body_, "</svg>\n");
}

}  // namespace meshfill
