#include "store/base/shell_word.h"

#include <gtest/gtest.h>

namespace ptc {
namespace {

TEST(ShellWord, IsAsItIsWhereThatIsSafe) {
  EXPECT_EQ(shell_word("/mnt/ptc/llama"), "/mnt/ptc/llama");
  EXPECT_EQ(shell_word("step 1"), "'step 1'");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_word(""), "''");
}

}  // namespace
}  // namespace ptc
