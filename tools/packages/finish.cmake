# What debhelper would do, between cmake --install and the packing: symbols apart, manual pages and changelogs
# compressed, files that only packages have. cpack runs it; each package is a folder of CPACK_TEMPORARY_DIRECTORY.
set(here ${CPACK_PTC_SOURCES}/tools/packages)
set(ptcfs ${CPACK_TEMPORARY_DIRECTORY}/ptcfs)
set(dbgsym ${CPACK_TEMPORARY_DIRECTORY}/dbgsym)
set(python ${CPACK_TEMPORARY_DIRECTORY}/python)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# put(FILE FOLDER NAME): a file of the sources, where the package has it.
function(put file folder name)
  configure_file(${file} ${folder}/${name} COPYONLY)
endfunction()

function(document folder package)
  put(${here}/copyright ${folder}/usr/share/doc/${package} copyright)
  put(${here}/changelog ${folder}/usr/share/doc/${package} changelog.Debian)
  run(gzip -9n ${folder}/usr/share/doc/${package}/changelog.Debian)
  configure_file(${here}/lintian-overrides ${folder}/usr/share/lintian/overrides/${package} @ONLY)
endfunction()

# Symbols: gdb, perf and the like find them by the build's id.
foreach(program ptc ptcfs)
  set(path ${ptcfs}/usr/bin/${program})
  execute_process(COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C readelf --notes ${path}
                  OUTPUT_VARIABLE notes COMMAND_ERROR_IS_FATAL ANY)
  if(NOT notes MATCHES "Build ID: ([0-9a-f][0-9a-f])([0-9a-f]+)")
    message(FATAL_ERROR "${path} has no build id, by which its symbols are found")
  endif()
  set(symbols ${dbgsym}/usr/lib/debug/.build-id/${CMAKE_MATCH_1}/${CMAKE_MATCH_2}.debug)
  cmake_path(GET symbols PARENT_PATH folder)
  file(MAKE_DIRECTORY ${folder})
  run(objcopy --only-keep-debug --compress-debug-sections ${path} ${symbols})
  run(strip --strip-unneeded --remove-section=.comment --remove-section=.note ${path})
  run(objcopy --add-gnu-debuglink=${symbols} ${path})
  run(chmod a-x ${symbols})
endforeach()

file(GLOB pages ${ptcfs}/usr/share/man/man*/*)
run(gzip -9n ${pages})
file(MAKE_DIRECTORY ${ptcfs}/lib)
file(RENAME ${ptcfs}/usr/lib/systemd ${ptcfs}/lib/systemd) # where Debian 12 has units
file(REMOVE_RECURSE ${ptcfs}/usr/lib)

# A node of a cluster needs addresses; until somebody writes them, the unit has no options.
set(deploy ${CPACK_PTC_SOURCES}/tools/deploy)
file(READ ${deploy}/ptcfs.default options)
string(REPLACE "\nPTCFS_OPTIONS" "\n#PTCFS_OPTIONS" options "${options}")
file(WRITE ${ptcfs}/etc/default/ptcfs "${options}")
put(${deploy}/kubernetes.yaml ${ptcfs}/usr/share/doc/ptcfs/examples kubernetes.yaml)
put(${deploy}/README.md ${ptcfs}/usr/share/doc/ptcfs deploy.md)
document(${ptcfs} ptcfs)

file(MAKE_DIRECTORY ${dbgsym}/usr/share/doc)
file(CREATE_LINK ptcfs ${dbgsym}/usr/share/doc/ptcfs-dbgsym SYMBOLIC)

configure_file(${here}/METADATA.in ${python}/usr/lib/python3/dist-packages/ptcfs-${CPACK_PACKAGE_VERSION}.dist-info/METADATA)
put(${CPACK_PTC_SOURCES}/tools/python/README.md ${python}/usr/share/doc/python3-ptcfs README.md)
document(${python} python3-ptcfs)

# Whatever umask the build had.
run(chmod -R u=rwX,go=rX ${ptcfs} ${dbgsym} ${python})
