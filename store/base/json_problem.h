// What is wrong with a text that should be JSON, in words that help whoever wrote it.
#pragma once

#include <boost/json/error.hpp>
#include <string>
#include <string_view>

namespace ptc {

/// `text` was parsed up to `offset`, where Boost.JSON found `error`.
std::string json_problem(std::string_view text, size_t offset,
                         const boost::json::error_code& error);

/// What stands behind "line 3, column 7: " in an error's message: for a text that nobody wrote.
std::string_view without_json_place(std::string_view message);

}  // namespace ptc
