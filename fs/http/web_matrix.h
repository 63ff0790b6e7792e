// Bytes from sources to targets, as a table with the warmth of each cell.
#pragma once

#include <boost/json/array.hpp>
#include <string>

namespace ptc {

/// `flows`: [{"source", "target", "bytes", "kind"}] of plan.json; several may have the same ends.
/// Rows are sources, columns are targets; "" when there are none.
std::string html_matrix(const boost::json::array& flows);

}  // namespace ptc
