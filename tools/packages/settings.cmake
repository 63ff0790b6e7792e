# What cpack reads before anything else: the version as changelog has it, which must be that of CMakeLists.txt.
set(changelog ${CPACK_PTC_SOURCES}/tools/packages/changelog)
file(STRINGS ${changelog} entry LIMIT_COUNT 1)
if(NOT entry MATCHES "^ptcfs \\((.+)-([^-]+)\\) " OR NOT CMAKE_MATCH_1 STREQUAL CPACK_PACKAGE_VERSION)
  message(FATAL_ERROR "CMakeLists.txt says version ${CPACK_PACKAGE_VERSION}, but ${changelog} begins with: ${entry}")
endif()
set(CPACK_DEBIAN_PACKAGE_RELEASE ${CMAKE_MATCH_2})
set(CPACK_DEBIAN_DBGSYM_PACKAGE_DEPENDS "ptcfs (= ${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
# All times are those of the changelog's newest entry, so that the same build gives the same packages.
if(NOT DEFINED ENV{SOURCE_DATE_EPOCH})
  execute_process(COMMAND dpkg-parsechangelog -l ${changelog} -S Timestamp
                  OUTPUT_VARIABLE timestamp OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(ENV{SOURCE_DATE_EPOCH} ${timestamp})
endif()
