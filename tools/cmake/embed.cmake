# Turns files into a C++ source: cmake -DOUTPUT=x.cc "-DFILES=a.json;b.json" -DHEADER=… -DTYPE=… -DFUNCTION=… -P …
# HEADER declares TYPE, a struct of two string_views (a file's name without its ending; its text), and
# FUNCTION, which returns a span of them, sorted by name. The texts become byte arrays, for which no
# limit on the length of string literals holds.
list(SORT FILES)
set(arrays "")
set(table "")
foreach(file IN LISTS FILES)
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR length "${digits} / 2")
  string(REGEX REPLACE "(..)" "'\\\\x\\1'," bytes "${bytes}")
  string(APPEND arrays "const char k_${name}[] = {${bytes}'\\0'};\n")
  string(APPEND table "    {\"${name}\", {k_${name}, ${length}}},\n")
endforeach()
file(WRITE ${OUTPUT} "// Made by tools/cmake/embed.cmake.
#include \"${HEADER}\"

namespace ptc {
namespace {

${arrays}
const ${TYPE} kFiles[] = {
${table}};

}  // namespace

std::span<const ${TYPE}> ${FUNCTION}() { return kFiles; }

}  // namespace ptc
")
