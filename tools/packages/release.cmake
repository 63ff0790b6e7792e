# cmake -C tools/packages/release.cmake -S . -B build-release: built for packages, with what Debian hardens its own by,
# and without paths of this machine. All other builds keep their flags, and so what ccache has of them.
set(ENV{DEB_BUILD_MAINT_OPTIONS} "hardening=+all optimize=-lto")
foreach(flags CPPFLAGS CXXFLAGS LDFLAGS)
  execute_process(COMMAND dpkg-buildflags --get ${flags}
                  OUTPUT_VARIABLE ${flags} OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endforeach()
# -g1 and -O2 are the build type's; dpkg maps only the folder that it is called in.
string(REGEX REPLACE "(^| )(-g|-O2|-f[a-z]+-prefix-map=[^ ]+)" "" CXXFLAGS "${CXXFLAGS}")
cmake_path(SET sources NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../..")
string(REGEX REPLACE "/$" "" sources "${sources}")
set(maps "-ffile-prefix-map=${sources}=/usr/src/ptcfs -ffile-prefix-map=${CMAKE_BINARY_DIR}=/usr/src/ptcfs/build")
set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "")
set(CMAKE_CXX_FLAGS "${CXXFLAGS} ${CPPFLAGS} ${maps}" CACHE STRING "")
set(CMAKE_EXE_LINKER_FLAGS "${LDFLAGS}" CACHE STRING "")
set(PTC_UNITY ON CACHE BOOL "")
set(PTC_TESTS OFF CACHE BOOL "")
set(PTC_CBC OFF CACHE STRING "") # it would bring a dozen packages to every node, for one answer of ptc spase plan
