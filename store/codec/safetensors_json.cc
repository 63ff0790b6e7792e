#include "store/codec/safetensors_json.h"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <optional>
#include <utility>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxMetadata = 1 << 16;  // entries; each takes more memory than text

/// What Boost.JSON's parser calls, token by token. A member that returns false ends the parsing;
/// `why()` says why, unless the text is no JSON.
class HeaderHandler {
 public:
  static constexpr size_t max_object_size = size_t(-1), max_array_size = size_t(-1);
  static constexpr size_t max_key_size = size_t(-1), max_string_size = size_t(-1);
  using Code = boost::system::error_code;
  using Text = json::string_view;

  explicit HeaderHandler(SafetensorsHeader& header) : header_(header) {}

  std::optional<Error> take_error() { return std::move(error_); }

  bool on_document_begin(Code&) { return true; }
  bool on_document_end(Code&) { return true; }

  bool on_object_begin(Code& code) {
    ++depth_;
    if (depth_ <= kHeader || skipping()) return true;
    if (depth_ == kMember) return true;
    return checked(wrong_value(), code);
  }
  bool on_object_end(size_t, Code& code) {
    bool tensor_ends = depth_ == kMember && !is_metadata_;
    bool right = !tensor_ends || checked(end_tensor(), code);
    --depth_;
    return right;
  }
  bool on_array_begin(Code& code) {
    if (depth_ == kHeader) return checked(wrong_value(), code);
    ++depth_;
    if (skipping()) return true;
    if (depth_ == kValue && field_ != Field::kDtype && !is_metadata_) {
      (field_ == Field::kShape ? shape_ : offsets_).emplace();
      return true;
    }
    return checked(wrong_value(), code);
  }
  bool on_array_end(size_t, Code&) {
    --depth_;
    return true;
  }

  bool on_key_part(Text part, size_t, Code&) {
    if (depth_ <= kMember) text_.append(part.data(), part.size());
    return true;
  }
  bool on_key(Text part, size_t, Code& code) {
    on_key_part(part, 0, code);
    if (depth_ > kMember) return true;
    std::string key = std::exchange(text_, {});
    return checked(depth_ == kHeader ? begin_member(std::move(key)) : begin_field(std::move(key)),
                   code);
  }
  bool on_string_part(Text part, size_t, Code&) {
    if (!skipping()) text_.append(part.data(), part.size());
    return true;
  }
  bool on_string(Text part, size_t, Code& code) {
    on_string_part(part, 0, code);
    return skipping() || checked(take_string(std::exchange(text_, {})), code);
  }
  bool on_number_part(Text, Code&) { return true; }
  bool on_int64(int64_t number, Text, Code& code) {
    if (number < 0) return on_double(0, {}, code);
    return on_uint64(static_cast<uint64_t>(number), {}, code);
  }
  bool on_uint64(uint64_t number, Text, Code& code) {
    return skipping() || checked(take_number(number), code);
  }
  bool on_double(double, Text, Code& code) { return skipping() || checked(wrong_value(), code); }
  bool on_bool(bool, Code& code) { return on_double(0, {}, code); }
  bool on_null(Code& code) { return on_double(0, {}, code); }
  bool on_comment_part(Text, Code&) { return true; }
  bool on_comment(Text, Code&) { return true; }

 private:
  /// Open brackets around a token: the header's, a member's, a list's in it.
  enum Depth : size_t { kDocument, kHeader, kMember, kValue };
  enum class Field { kDtype, kShape, kOffsets, kOther };
  using Numbers = std::vector<uint64_t>;

  bool checked(Result<> result, Code& code) {
    if (result.has_value()) return true;
    error_ = std::move(result).error();
    code = boost::system::errc::make_error_code(boost::system::errc::invalid_argument);
    return false;
  }
  bool skipping() const { return depth_ >= kMember && !is_metadata_ && field_ == Field::kOther; }
  Error in_tensor(Error error) const {
    return std::move(error).with_context("tensor " + quoted(name_));
  }

  Result<> begin_member(std::string name) {
    name_ = std::move(name);
    is_metadata_ = name_ == kMetadataKey;
    if (is_metadata_ && std::exchange(had_metadata_, true)) return twice(name_);
    if (name_.find('\0') != std::string::npos)
      return invalid_argument("the tensor name {} has a NUL", quoted(name_));
    field_ = Field::kShape;  // something that is not skipped
    seen_ = 0;
    dtype_.reset();
    shape_.reset();
    offsets_.reset();
    return ok();
  }

  Result<> begin_field(std::string key) {
    if (is_metadata_) {
      key_ = std::move(key);
      return ok();
    }
    field_ = key == "dtype"          ? Field::kDtype
             : key == "shape"        ? Field::kShape
             : key == "data_offsets" ? Field::kOffsets
                                     : Field::kOther;
    if (field_ == Field::kOther) return ok();
    unsigned bit = 1u << static_cast<unsigned>(field_);
    if ((std::exchange(seen_, seen_ | bit) & bit) != 0) return in_tensor(twice(key));
    return ok();
  }

  Result<> take_string(std::string text) {
    if (is_metadata_ && depth_ == kMember) {
      if (header_.metadata.size() == kMaxMetadata)
        return invalid_argument("__metadata__ has more than {} entries", kMaxMetadata);
      if (!header_.metadata.emplace(key_, std::move(text)).second) return twice(key_);
      return ok();
    }
    if (depth_ != kMember || field_ != Field::kDtype) return wrong_value();
    auto dtype = parse_dtype(text);
    if (!dtype) return in_tensor(std::move(dtype).error());
    dtype_ = dtype.value();
    return ok();
  }

  Result<> take_number(uint64_t number) {
    if (is_metadata_ || depth_ != kValue) return wrong_value();
    Numbers& numbers = *(field_ == Field::kShape ? shape_ : offsets_);
    // Counted on, so that the message can tell how many there are.
    if (numbers.size() <= kMaxAxes) numbers.push_back(number);
    if (numbers.size() > (field_ == Field::kShape ? kMaxAxes : 2)) return wrong_value();
    return ok();
  }

  Result<> end_tensor() {
    TensorEntry entry;
    for (Field field : {Field::kDtype, Field::kShape, Field::kOffsets}) {
      field_ = field;
      if ((seen_ & 1u << static_cast<unsigned>(field)) == 0) return wrong_value();
    }
    entry.name = std::move(name_);
    name_ = entry.name;
    entry.dtype = *dtype_;
    for (uint64_t count : *shape_) entry.shape.push_back(count);
    if (offsets_->size() != 2 || offsets_->front() > offsets_->back()) return wrong_value();
    const uint64_t begin = offsets_->front(), end = offsets_->back();
    auto bytes = array_bytes(entry.shape, entry.dtype);
    if (!bytes) return in_tensor(std::move(bytes).error());
    entry.offset = begin;
    entry.bytes = bytes.value();
    if (entry.bytes != end - begin) {
      return in_tensor(invalid_argument("{} {} takes {} bytes, but data_offsets [{}, {}] span {}",
                                        dtype_name(entry.dtype), entry.shape.to_string(),
                                        entry.bytes, begin, end, end - begin));
    }
    header_.tensors.push_back(std::move(entry));
    return ok();
  }

  /// What is there where something else must be.
  Error wrong_value() const {
    if (is_metadata_) {
      if (depth_ <= kHeader || key_.empty())
        return invalid_argument("__metadata__ must be an object");
      return invalid_argument("__metadata__ {} must be a string", quoted(key_));
    }
    if (depth_ == kHeader) return in_tensor(invalid_argument("it must be an object"));
    switch (field_) {
      case Field::kDtype:
        return in_tensor(invalid_argument("'dtype' must be a string"));
      case Field::kShape:
        if (shape_ && shape_->size() > kMaxAxes)
          return in_tensor(invalid_argument("tensors of at most {} axes are supported", kMaxAxes));
        return in_tensor(invalid_argument("'shape' must be a list of whole numbers"));
      default:
        return in_tensor(
            invalid_argument("'data_offsets' must be [begin, end], whole numbers in order"));
    }
  }
  static Error twice(std::string_view key) {
    return invalid_argument("{} is there twice; remove one", quoted(key));
  }

  SafetensorsHeader& header_;
  std::optional<Error> error_;
  size_t depth_ = kDocument;
  std::string text_;  // of a key or string that comes in parts
  std::string name_;  // of the member of the header
  bool is_metadata_ = false, had_metadata_ = false;
  std::string key_;  // in __metadata__
  Field field_ = Field::kShape;
  unsigned seen_ = 0;  // fields, as bits
  std::optional<DType> dtype_;
  std::optional<Numbers> shape_, offsets_;
};

/// kInvalidArgument when two tensors have one name.
Result<> check_names(const std::vector<TensorEntry>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorEntry& entry : tensors) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  if (auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    return invalid_argument("the key {} is there twice; remove one", quoted(*twice));
  return ok();
}

}  // namespace

Result<> parse_safetensors_json(std::string_view text, SafetensorsHeader& header) {
  json::parse_options options;
  options.max_depth = kMaxDepth;
  json::basic_parser<HeaderHandler> parser(options, header);
  boost::system::error_code code;
  size_t used = parser.write_some(false, text.data(), text.size(), code);
  if (auto error = parser.handler().take_error()) return std::move(*error);
  if (!code && used < text.size()) code = json::error::extra_data;
  if (code) {
    return invalid_argument("safetensors header, byte {}: not valid JSON: {}", used + 1,
                            code == json::error::incomplete   ? "the text ends too early"
                            : code == json::error::extra_data ? "more text after the end"
                            : code == json::error::too_deep   ? "nested deeper than 32"
                                                              : code.message());
  }
  return check_names(header.tensors);
}

}  // namespace ptc
