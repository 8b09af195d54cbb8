# Writes build_name.cc, where the commit is another than at the build before. The commit is GIVEN, else that of Git in FOLDER.
set(COMMIT "${GIVEN}")
if(NOT COMMIT)
  execute_process(COMMAND git -C ${FOLDER} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT MATCHES "^[0-9a-f]+$")
  set(COMMIT unknown)
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_name.cc.in ${OUT} @ONLY)
