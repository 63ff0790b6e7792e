// What is known to be wrong of a checkpoint: what is right in no copy within reach, and copies that
// cannot be mended now, though another is right. None of it is read any more, until a look finds it
// right. Nodes agree on it (LookedOver in job/job_record.h).
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ptc {

/// A value.
struct KnownDamage {
  std::vector<uint32_t> tensors;    // of Checkpoint::tensor_facts(); ascending
  std::vector<uint32_t> files;      // without tensors, of Manifest::files; ascending
  std::vector<std::string> images;  // wrong beside their tensors, by id; ascending
  std::vector<std::string> copies;  // of which all is read from others, by id; ascending

  bool none() const { return tensors.empty() && files.empty() && images.empty() && copies.empty(); }
  bool has_tensor(uint32_t tensor) const;
  bool has_file(uint32_t file) const;
  bool has_image(std::string_view id) const;
  bool has_copy(std::string_view id) const;
  friend bool operator==(const KnownDamage&, const KnownDamage&) = default;

  /// As it is agreed on. Numbers that follow each other take no more room than two, and of very
  /// many all between the first and the last count: it is at most some 100 KB.
  boost::json::object to_json() const;
  /// What is not understood of it is left out.
  static KnownDamage from_json(const boost::json::object& object);
};

}  // namespace ptc
