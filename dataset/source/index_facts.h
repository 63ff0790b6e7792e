// IndexFacts as bytes at the end of an index.
#pragma once

#include <string>
#include <string_view>

#include "dataset/source/sample_index.h"

namespace ptc {

std::string write_index_facts(const IndexFacts& facts);
Result<IndexFacts> read_index_facts(std::string_view bytes);  // kCorrupt

}  // namespace ptc
