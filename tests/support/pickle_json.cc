#include "pickle_json.h"

#include <bit>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <optional>

namespace ptc {
namespace {

class Writer {
 public:
  Writer(const Pickle& pickle, size_t most_values) : pickle_(pickle), left_(most_values) {}

  void write(PickleId id, size_t depth) {
    if (depth == 0 || left_ == 0) {
      out += "\"…\"";
      return;
    }
    --left_;
    switch (pickle_.kind(id)) {
      case PickleKind::kNone:
        out += "null";
        return;
      case PickleKind::kFalse:
        out += "false";
        return;
      case PickleKind::kTrue:
        out += "true";
        return;
      case PickleKind::kInt:
        out += std::to_string(pickle_.integer(id));
        return;
      case PickleKind::kLong:
        tagged("long", pickle_.is_decimal(id) ? std::string(pickle_.text(id))
                                              : hex(pickle_.long_bytes(id)));
        return;
      case PickleKind::kFloat:
        tagged("float", fmt::format("{:016x}", std::bit_cast<uint64_t>(pickle_.number(id))));
        return;
      case PickleKind::kText:
        text(pickle_.text(id));
        return;
      case PickleKind::kBytes:
        tagged("bytes", hex(pickle_.text(id)));
        return;
      case PickleKind::kByteArray:
        tagged("bytearray", hex(pickle_.text(id)));
        return;
      case PickleKind::kTuple:
        items("tuple", id, depth);
        return;
      case PickleKind::kList:
        items(nullptr, id, depth);
        return;
      case PickleKind::kSet:
        items("set", id, depth);
        return;
      case PickleKind::kFrozenSet:
        items("frozenset", id, depth);
        return;
      case PickleKind::kDict: {
        out += "{\"dict\":[";
        const char* comma = "";
        auto done = pickle_.for_pairs(id, [&](PickleId key, PickleId value) -> Result<> {
          out.append(comma).append("[");
          comma = ",";
          write(key, depth - 1);
          out += ',';
          write(value, depth - 1);
          out += ']';
          return ok();
        });
        PTC_CHECK(done.has_value());
        out += "]}";
        return;
      }
      case PickleKind::kGlobal:
        tagged("global", fmt::format("{} {}", pickle_.module(id), pickle_.name(id)));
        return;
      case PickleKind::kPersistent:
        out += "{\"id\":";
        write(pickle_.arguments(id), depth - 1);
        out += '}';
        return;
      case PickleKind::kObject:
        object(id, depth);
        return;
    }
  }

  std::string out;

 private:
  static std::string hex(std::string_view bytes) {
    std::string digits;
    for (const char c : bytes) digits += fmt::format("{:02x}", static_cast<unsigned char>(c));
    return digits;
  }
  void text(std::string_view value) { out += boost::json::serialize(boost::json::string(value)); }
  void tagged(const char* tag, const std::string& value) {
    out.append("{\"").append(tag).append("\":");
    text(value);
    out += '}';
  }
  void items(const char* tag, PickleId id, size_t depth) {
    if (tag != nullptr) out.append("{\"").append(tag).append("\":");
    out += '[';
    const char* comma = "";
    auto done = pickle_.for_items(id, [&](PickleId item) -> Result<> {
      out += comma;
      comma = ",";
      write(item, depth - 1);
      return ok();
    });
    PTC_CHECK(done.has_value());
    out += tag == nullptr ? "]" : "]}";
  }
  void object(PickleId id, size_t depth) {
    constexpr const char* kCalls[] = {"reduce", "new", "new_keyed", "old"};
    constexpr const char* kChanges[] = {"items", "pairs", "state"};
    out.append("{\"call\":[\"").append(kCalls[static_cast<int>(pickle_.call(id))]).append("\",");
    write(pickle_.called(id), depth - 1);
    out += ',';
    write(pickle_.arguments(id), depth - 1);
    out += ",[";
    std::optional<Pickle::Change::Kind> open;
    for (Pickle::Changes changes = pickle_.changes(id); changes.more(); changes.next()) {
      const Pickle::Change change = *changes;
      if (open != change.kind ||
          change.kind == Pickle::Change::Kind::kState)  // else more of the same
        out.append(open ? "],[\"" : "[\"")
            .append(kChanges[static_cast<int>(change.kind)])
            .append("\"");
      open = change.kind;
      for (uint32_t i = 0; i < change.count; ++i) {
        out += ',';
        write(pickle_.value(change.first + i), depth - 1);
      }
    }
    if (open) out += ']';
    out += "]]}";
  }

  const Pickle& pickle_;
  size_t left_;
};

}  // namespace

std::string pickle_json(const Pickle& pickle, PickleId id, size_t most_depth, size_t most_values) {
  Writer writer(pickle, most_values);
  writer.write(id, most_depth);
  return std::move(writer.out);
}

}  // namespace ptc
