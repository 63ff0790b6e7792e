#include "dataset/source/index_facts.h"

#include "store/base/bytes.h"

namespace ptc {
namespace {

template <class List, class Write>
void write_list(ByteWriter& writer, const List& list, const Write& write) {
  writer.number(uint64_t{list.size()});
  for (const auto& item : list) write(item);
}

template <class List, class Read>
void read_list(ByteReader& reader, List& list, const Read& read) {
  for (uint64_t left = reader.number<uint64_t>(); left > 0 && reader.good(); --left)
    list.push_back(read());
}

}  // namespace

std::string write_index_facts(const IndexFacts& facts) {
  ByteWriter writer;
  writer.number(static_cast<uint8_t>(facts.format));
  for (uint64_t number : {facts.digest, facts.samples, facts.bytes, facts.fingerprint,
                          facts.places_fingerprint, facts.former_fingerprint})
    writer.number(number);
  writer.number(facts.megatron_dtype);
  writer.number(static_cast<uint8_t>(facts.keys_repeat));
  auto text = [&](std::string_view value) { writer.text(value); };
  write_list(writer, facts.roots, text);
  write_list(writer, facts.field_names, text);
  write_list(writer, facts.columns, [&](const MdsColumn& column) {
    writer.text(column.name);
    writer.text(column.encoding);
    writer.number(static_cast<uint8_t>(column.bytes.has_value()));
    writer.number(column.bytes.value_or(0));
  });
  write_list(writer, facts.skipped, [&](const SkippedShard& shard) {
    writer.text(shard.path);
    writer.text(shard.reason);
  });
  write_list(writer, facts.directories, [&](const ListedShard& directory) {
    writer.number(directory.root);
    writer.text(directory.name);
    writer.number(directory.stamp.bytes);
    writer.number(static_cast<uint64_t>(directory.stamp.mtime_ns));
    writer.number(directory.stamp.inode);
  });
  const ShardRights::Facts& rights = facts.rights.facts();
  writer.number(static_cast<uint8_t>(rights.any));
  writer.number(static_cast<uint8_t>(rights.one_group));
  writer.number(static_cast<uint32_t>(rights.group));
  writer.number(static_cast<uint32_t>(rights.mode));
  return writer.take();
}

Result<IndexFacts> read_index_facts(std::string_view bytes) {
  ByteReader reader(bytes);
  IndexFacts facts;
  facts.format = static_cast<SourceFormat>(reader.number<uint8_t>());
  for (uint64_t* number : {&facts.digest, &facts.samples, &facts.bytes, &facts.fingerprint,
                           &facts.places_fingerprint, &facts.former_fingerprint})
    *number = reader.number<uint64_t>();
  facts.megatron_dtype = reader.number<uint8_t>();
  facts.keys_repeat = reader.number<uint8_t>() != 0;
  auto text = [&] { return std::string(reader.text(bytes.size())); };
  read_list(reader, facts.roots, text);
  read_list(reader, facts.field_names, text);
  read_list(reader, facts.columns, [&] {
    MdsColumn column{.name = text(), .encoding = text()};
    const bool fixed = reader.number<uint8_t>() != 0;
    const auto size = reader.number<uint32_t>();
    if (fixed) column.bytes = size;
    return column;
  });
  read_list(reader, facts.skipped, [&] {
    SkippedShard shard{.path = text()};
    shard.reason = text();
    return shard;
  });
  read_list(reader, facts.directories, [&] {
    ListedShard directory{.root = reader.number<uint32_t>()};
    directory.name = text();
    directory.stamp = {.bytes = reader.number<uint64_t>(),
                       .mtime_ns = static_cast<int64_t>(reader.number<uint64_t>()),
                       .inode = reader.number<uint64_t>()};
    return directory;
  });
  ShardRights::Facts rights;
  rights.any = reader.number<uint8_t>() != 0;
  rights.one_group = reader.number<uint8_t>() != 0;
  rights.group = reader.number<uint32_t>();
  rights.mode = reader.number<uint32_t>();
  facts.rights = ShardRights(rights);
  if (!reader.done() || facts.format > SourceFormat::kFiles)
    return Error(Code::kCorrupt, "the facts at its end are damaged");
  return facts;
}

}  // namespace ptc
