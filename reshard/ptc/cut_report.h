// Says in words how a layout cuts each tensor of a model: for `ptc rules check`.
#pragma once

#include <boost/json/object.hpp>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"
#include "store/base/error.h"

namespace ptc {

/// {"format": "ptc-cuts/1", "family", "layout", "facts", "tied", "fits", "contradictions",
/// "unused_rules": [{"names", "why"}], "tensors": […]}. Of a family's rules it does not matter
/// whether they are used. Tensors that are cut alike and whose names differ in numbers only are one
/// entry of "tensors": "layers.{0-31}.mlp.up_proj.weight". `names` not empty: only tensors with one
/// of them in their name; kNotFound where there is none. A layout that does not fit is no error:
/// "fits" says why.
Result<boost::json::object> cut_report(const Model& model, const LayoutSpec& spec,
                                       const std::vector<std::string>& names);

}  // namespace ptc
