#include "fuzz.h"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cstdint>
#include <cstring>

namespace ptc::fuzz {

void check_error(const Error& error) {
  constexpr size_t kScreen = 4096;
  PTC_CHECK(error.code() == Code::kInvalidArgument || error.code() == Code::kCorrupt);
  const std::string& message = error.message();
  PTC_CHECK(!message.empty() && message.size() <= kScreen);
  for (char c : message) PTC_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F);
  boost::system::error_code not_utf8;
  boost::json::parse(boost::json::serialize(boost::json::string(message)), not_utf8);
  PTC_CHECK(!not_utf8);
}

std::string repeated(std::string_view begin, std::string_view text, size_t times,
                     std::string_view end) {
  std::string all(begin);
  all.reserve(begin.size() + text.size() * times + end.size());
  while (times-- > 0) all += text;
  all += end;
  return all;
}

uint64_t take_number(std::string_view& input) {
  uint64_t number = 0;
  if (input.size() < sizeof number) return number;
  std::memcpy(&number, input.data(), sizeof number);
  input.remove_prefix(sizeof number);
  return number;
}

}  // namespace ptc::fuzz
