// Shards of all formats, written by the formats' own description and not by what they are read
// with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ptc {

/// A sample as its writer sees it: fields with their names.
struct TestSample {
  std::string key;
  std::vector<std::pair<std::string, std::string>> fields;
};

template <class Number>
std::string le(Number number) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof number);
}

/// One member; names of more than 100 bytes by GNU's 'L', or with `pax` by a pax header.
std::string tar_member(std::string_view name, std::string_view data, char type = '0',
                       bool pax = false);
std::string tar_end();
std::string tar_shard(const std::vector<TestSample>& samples);

std::string tfrecord(std::string_view data);
/// Columns sorted by name, all of variable length but those in `fixed`.
std::string mds_shard(const std::vector<TestSample>& samples,
                      const std::vector<std::string>& fixed = {});
std::string mds_index_json(const std::vector<TestSample>& samples,
                           const std::vector<std::pair<std::string, std::string>>& shards,
                           const std::vector<uint64_t>& counts,
                           const std::vector<std::string>& fixed = {});

/// The .idx of sequences of u16 tokens with these numbers of bytes.
std::string megatron_idx(const std::vector<std::string>& sequences);

void write_test_file(const std::string& path, std::string_view content);
std::string read_test_file(const std::string& path);

}  // namespace ptc
