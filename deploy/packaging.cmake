# `cmake --install` and, with `cpack`, a Debian package: the binary, its manual pages and completion, made from its own help,
# the documents, the examples, and what the documents have people load: the dashboard, the rules, Envoy's configuration.
include(GNUInstallDirs)
find_package(Python3 REQUIRED COMPONENTS Interpreter)

install(TARGETS meshfill)
install(FILES README.md CHANGELOG.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs configs DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES deploy/grafana/meshfill.json DESTINATION ${CMAKE_INSTALL_DOCDIR}/deploy/grafana)
install(FILES deploy/prometheus/recording.yml deploy/prometheus/alerts.yml deploy/prometheus/prometheus.yml
  DESTINATION ${CMAKE_INSTALL_DOCDIR}/deploy/prometheus)
install(FILES deploy/envoy/meshfill.yaml DESTINATION ${CMAKE_INSTALL_DOCDIR}/deploy/envoy)

find_program(MESHFILL_HELP2MAN help2man)
if(MESHFILL_HELP2MAN)
  set(manual ${PROJECT_BINARY_DIR}/manual)
  add_custom_command(OUTPUT ${manual}/made
    COMMAND Python3::Interpreter ${CMAKE_CURRENT_LIST_DIR}/make_manual.py $<TARGET_FILE:meshfill> ${manual}
    DEPENDS meshfill ${CMAKE_CURRENT_LIST_DIR}/make_manual.py
    VERBATIM)
  add_custom_target(meshfill_manual ALL DEPENDS ${manual}/made)
  install(DIRECTORY ${manual}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR})
  install(FILES ${manual}/meshfill.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME meshfill)
else()
  message(STATUS "help2man is missing: no manual pages, no completion")
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME meshfill)
set(CPACK_PACKAGE_CONTACT "The Meshfill developers")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Prefill server for very long prompts")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
include(CPack)
