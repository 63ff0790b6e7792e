# Turns rule files into a C++ source: cmake -DOUTPUT=builtin_rules.cc "-DFILES=a.json;b.json" -P …
# The texts become byte arrays, for which no limit on the length of string literals holds.
list(SORT FILES)
set(arrays "")
set(table "")
foreach(file IN LISTS FILES)
  get_filename_component(family ${file} NAME_WE)
  file(READ ${file} bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR length "${digits} / 2")
  string(REGEX REPLACE "(..)" "'\\\\x\\1'," bytes "${bytes}")
  string(APPEND arrays "const char k_${family}[] = {${bytes}'\\0'};\n")
  string(APPEND table "    {\"${family}\", {k_${family}, ${length}}},\n")
endforeach()
file(WRITE ${OUTPUT} "// Made by reshard/rules/embed.cmake from the rule files beside it.
#include \"reshard/ptc/builtin_rules.h\"

namespace ptc {
namespace {

${arrays}
const BuiltinRules kRules[] = {
${table}};

}  // namespace

std::span<const BuiltinRules> builtin_rules() { return kRules; }

}  // namespace ptc
")
