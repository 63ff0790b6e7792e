// What tests of this folder say about a Result.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// EXPECT_TRUE(has_error(result, code, "part of the message")).
template <class T>
testing::AssertionResult has_error(const Result<T>& result, Code code, std::string_view part = "") {
  if (result) return testing::AssertionFailure() << "no error";
  const Error& error = result.error();
  if (error.code() == code && error.message().find(part) != std::string::npos)
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << code_name(error.code()) << ": " << error.message();
}

/// ASSERT_TRUE(is_ok(result)).
template <class T>
testing::AssertionResult is_ok(const Result<T>& result) {
  if (result) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << code_name(result.error().code()) << ": " << result.error().message();
}

}  // namespace ptc
