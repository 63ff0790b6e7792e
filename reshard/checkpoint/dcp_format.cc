#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/json_numbers.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMostTableBytes = size_t{1} << 32;

class DcpFormat final : public FileFormat {
 public:
  Result<std::string> outline(const ReadAt&, uint64_t, std::optional<DType>) const override {
    return invalid_argument(
        "the files beside it do not say which tensors it has: it is of PyTorch's distributed "
        "checkpointing without its .metadata, or an index names it that is of safetensors");
  }
  Result<FileTensors> tensors(const FileOutline& outline, std::string_view,
                              std::optional<DType>) const override {
    PTC_TRY(auto table, parse_dcp_table(outline.text, outline.file_bytes));
    FileTensors found;
    found.tensors = std::move(table.tensors);
    found.boxes = std::move(table.boxes);
    found.gaps_are_others = true;  // zip headers, pickles
    return found;
  }
  Result<FileLayout> lay_out(std::span<const NewArray>, std::span<const FileOutline>,
                             std::span<const NewArgument>) const override {
    return make_error(Code::kInternal, "no layout has files of distributed checkpointing");
  }
};

}  // namespace

std::string dcp_table_text(const DcpTable& table) {
  json::array tensors, values, beside;
  std::string bytes;
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const TensorEntry& tensor = table.tensors[i];
    tensors.push_back(json::array{json::value(tensor.name), json::value(dtype_name(tensor.dtype)),
                                  to_array(table.boxes[i].offset), to_array(table.boxes[i].extent),
                                  tensor.offset, tensor.bytes});
    if (table.paths.empty()) continue;
    tensors.back().as_array().push_back(json::value(table.paths[i]));
    if (!table.rows.empty() && table.rows[i]) tensors.back().as_array().push_back(*table.rows[i]);
  }
  for (const auto& [path, value] : table.values) {
    values.push_back(json::array{json::value(path), value.size()});
    bytes += value;
  }
  json::object all{{"tensors", std::move(tensors)}, {"values", std::move(values)}};
  for (const auto& [name, content] : table.beside) {
    beside.push_back(json::array{json::value(name), content.size()});
    bytes += content;
  }
  if (!beside.empty()) all.emplace("beside", std::move(beside));
  return json::serialize(all) + "\n" + bytes;
}

Result<DcpTable> parse_dcp_table(std::string_view text, uint64_t file_bytes) {
  const auto damaged = [](std::string_view why) {
    return make_error(Code::kCorrupt, "the table of its tensors is damaged: {}", why);
  };
  const size_t line = std::min(text.find('\n'), text.size());
  PTC_TRY(auto parsed, parse_json(text.substr(0, line), {.max_bytes = kMostTableBytes}));
  text.remove_prefix(std::min(line + 1, text.size()));
  DcpTable table;
  try {
    for (const json::value& value : parsed.as_object().at("tensors").as_array()) {
      const json::array& fields = value.as_array();
      TensorEntry entry;
      entry.name = std::string(fields.at(0).as_string());
      PTC_TRY(entry.dtype, parse_dtype(std::string_view(fields.at(1).as_string())));
      table.boxes.push_back(box_from(fields.at(2), fields.at(3)));
      entry.shape = table.boxes.back().extent;
      entry.offset = fields.at(4).to_number<uint64_t>();
      entry.bytes = fields.at(5).to_number<uint64_t>();
      PTC_TRY(const uint64_t bytes, array_bytes(entry.shape, entry.dtype));
      const Box& box = table.boxes.back();
      bool ends = true;  // before the last number there is
      for (size_t axis = 0; axis < box.axes(); ++axis)
        ends = ends && box.extent[axis] <= UINT64_MAX - box.offset[axis];
      if (!ends || bytes != entry.bytes || entry.offset > file_bytes ||
          entry.bytes > file_bytes - entry.offset)
        return damaged(ptc::quoted(entry.name));
      table.tensors.push_back(std::move(entry));
      if (fields.size() > 6) table.paths.emplace_back(fields.at(6).as_string());
      table.rows.emplace_back();
      if (fields.size() > 7) table.rows.back() = fields.at(7).to_number<uint64_t>();
    }
    if (!table.paths.empty() && table.paths.size() != table.tensors.size())
      return damaged("paths are missing");
    const auto take = [&](const json::array& named, auto& into) {
      for (const json::value& value : named) {
        const json::array& fields = value.as_array();
        const uint64_t bytes = fields.at(1).to_number<uint64_t>();
        if (bytes > text.size()) return false;
        into.emplace_back(std::string(fields.at(0).as_string()), text.substr(0, bytes));
        text.remove_prefix(bytes);
      }
      return true;
    };
    const json::object& all = parsed.as_object();
    if (!take(all.at("values").as_array(), table.values)) return damaged("it is cut short");
    if (const json::value* beside = all.if_contains("beside"))
      if (!take(beside->as_array(), table.beside)) return damaged("it is cut short");
  } catch (const std::exception& error) {
    return damaged(error.what());
  }
  return table;
}

const FileFormat& dcp_format() {
  static const DcpFormat format;
  return format;
}

}  // namespace ptc
