// What tests read in pictures.
#ifndef MESHFILL_TESTS_SERVER_PICTURES_SVG_TEXT_H_
#define MESHFILL_TESTS_SERVER_PICTURES_SVG_TEXT_H_

#include <string>

namespace meshfill {

// The file's shapes, without what each file has.
inline std::string Shapes(const std::string& file) {
  const size_t page = file.find("<rect class=\"page\""), begin = file.find('\n', page) + 1;
  return file.substr(begin, file.rfind("</svg>") - begin);
}

// Its texts, one a line.
inline std::string Texts(const std::string& file) {
  std::string texts;
  for (size_t at = file.find("<text "); at != std::string::npos; at = file.find("<text ", at + 1)) {
    const size_t begin = file.find('>', at) + 1;
    texts.append(file, begin, file.find('<', begin) - begin).append("\n");
  }
  return texts;
}

inline int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) ++count;
  return count;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_PICTURES_SVG_TEXT_H_
