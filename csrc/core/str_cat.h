// StrCat(a, b, ...): strings and integers joined into one string.
#ifndef PAGEMILL_CSRC_CORE_STR_CAT_H_
#define PAGEMILL_CSRC_CORE_STR_CAT_H_

#include <concepts>
#include <string>
#include <string_view>

namespace pagemill {

namespace internal {
inline void Append(std::string& out, std::string_view text) { out += text; }
template <std::integral T>
void Append(std::string& out, T value) {
  out += std::to_string(value);
}
}  // namespace internal

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (internal::Append(out, parts), ...);
  return out;
}

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_STR_CAT_H_
