// What is wrong with a text that should be JSON, in words that help whoever wrote it.
#pragma once

#include <boost/json/error.hpp>
#include <string>
#include <string_view>

namespace ptc {

/// `text` was parsed up to `offset`, where Boost.JSON found `error`.
std::string json_problem(std::string_view text, size_t offset,
                         const boost::json::error_code& error);

}  // namespace ptc
