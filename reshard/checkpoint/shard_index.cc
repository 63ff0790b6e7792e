#include "reshard/checkpoint/shard_index.h"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <filesystem>
#include <optional>
#include <utility>

#include "store/base/json.h"
#include "store/base/json_problem.h"

namespace ptc {
namespace {

constexpr size_t kMaxDepth = 8;

/// Whether a path leads down from where it is, and is written in the only way it can be.
bool leads_down(const std::string& path) {
  const std::filesystem::path whole(path);
  return whole.is_relative() && whole.has_filename() && whole == whole.lexically_normal() &&
         *whole.begin() != ".." && *whole.begin() != ".";
}

/// What Boost.JSON's parser calls, token by token. A member that returns false ends the parsing;
/// `why` says why, unless the text is no JSON.
class IndexHandler {
 public:
  static constexpr size_t max_object_size = size_t(-1), max_array_size = size_t(-1);
  static constexpr size_t max_key_size = size_t(-1), max_string_size = size_t(-1);
  using Code = boost::system::error_code;
  using Text = json::string_view;

  ShardIndex index;
  bool has_map = false;
  std::optional<Error> why;

  bool on_document_begin(Code&) { return true; }
  bool on_document_end(Code&) { return true; }
  bool on_object_begin(Code& code) {
    if (depth_ == 1 && map_next_) has_map = in_map_ = true;
    else if (!other_value(code)) return false;
    ++depth_;
    return true;
  }
  bool on_object_end(size_t, Code&) { return end(); }
  bool on_array_begin(Code& code) { return other_value(code) && ++depth_ > 0; }
  bool on_array_end(size_t, Code&) { return end(); }
  bool on_key_part(Text part, size_t, Code&) { return add(part); }
  bool on_key(Text part, size_t, Code&) {
    add(part);
    key_ = std::exchange(text_, {});
    map_next_ = depth_ == 1 && key_ == "weight_map";
    return true;
  }
  bool on_string_part(Text part, size_t, Code&) { return add(part); }
  bool on_string(Text part, size_t, Code& code) {
    add(part);
    std::string file = std::exchange(text_, {});
    if (!in_map_) return other_value(code);
    if (!leads_down(file)) return no_file(file, code);
    index[std::move(file)].push_back(std::move(key_));
    return true;
  }
  bool on_number_part(Text, Code&) { return true; }
  bool on_int64(int64_t, Text, Code& code) { return other_value(code); }
  bool on_uint64(uint64_t, Text, Code& code) { return other_value(code); }
  bool on_double(double, Text, Code& code) { return other_value(code); }
  bool on_bool(bool, Code& code) { return other_value(code); }
  bool on_null(Code& code) { return other_value(code); }
  bool on_comment_part(Text, Code&) { return true; }
  bool on_comment(Text, Code&) { return true; }

 private:
  bool fail(Error error, Code& code) {
    why = std::move(error);
    code = boost::system::errc::make_error_code(boost::system::errc::invalid_argument);
    return false;
  }
  bool no_file(std::string_view what, Code& code) {
    return fail(
        invalid_argument("tensor {} is said to be in {}, which is not the name of a file beside "
                         "the index",
                         ptc::quoted(key_), ptc::quoted(what)),
        code);
  }
  /// A value that is neither the map nor a file in it: wrong only where one of these must be.
  bool other_value(Code& code) {
    if (in_map_) return no_file("something else", code);
    if (map_next_) return fail(invalid_argument("'weight_map' is not an object"), code);
    return true;
  }
  bool end() {
    if (--depth_ == 1) in_map_ = map_next_ = false;
    return true;
  }
  bool add(Text part) {
    text_.append(part.data(), part.size());
    return true;
  }

  size_t depth_ = 0;
  bool map_next_ = false;  // the key before was weight_map
  bool in_map_ = false;
  std::string key_, text_;
};

}  // namespace

Result<ShardIndex> parse_shard_index(std::string_view text) {
  json::parse_options options;
  options.max_depth = kMaxDepth;
  json::basic_parser<IndexHandler> parser(options);
  boost::system::error_code code;
  const size_t used = parser.write_some(false, text.data(), text.size(), code);
  IndexHandler& handler = parser.handler();
  if (handler.why) return std::move(*handler.why);
  if (!code && used < text.size()) code = json::error::extra_data;
  if (code)
    return invalid_argument(
        "line {}: not valid JSON: {}",
        1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(used), '\n'),
        json_problem(text, used, code));
  if (!handler.has_map) return invalid_argument("there is no 'weight_map'");
  return std::move(handler.index);
}

}  // namespace ptc
