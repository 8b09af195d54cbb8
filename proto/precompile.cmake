# A precompiled header of what most files include, for all targets of engine, server and tests. With sanitizers a file of the
# server takes 30 s at -O1, most of it in these headers; so it takes 6 s at -O0. The other presets do without, so that a missing
# include is found, and so that ccache finds objects of other folders.
find_package(GTest REQUIRED)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/precompiled.cc CONTENT "")
add_library(meshfill_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled.cc)
target_link_libraries(meshfill_precompiled PRIVATE meshfill_proto GTest::gmock)
if(MESHFILL_SANITIZE MATCHES thread)
  set(first_header ${PROJECT_SOURCE_DIR}/proto/as_libraries.h)
endif()
target_precompile_headers(meshfill_precompiled PRIVATE ${first_header}
  <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/strings/str_join.h>
  <absl/strings/str_split.h> <absl/time/time.h>
  <algorithm> <filesystem> <fstream> <functional> <random> <sstream> <thread>
  <gmock/gmock.h> <grpcpp/grpcpp.h> <gtest/gtest.h> <nlohmann/json.hpp>
  <meshfill/v1/config.pb.h> <meshfill/v1/control.grpc.pb.h> <meshfill/v1/prefill.grpc.pb.h>)

function(meshfill_precompile FOLDER)
  get_property(targets DIRECTORY ${FOLDER} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type MATCHES "EXECUTABLE|STATIC_LIBRARY|OBJECT_LIBRARY")
      # As the header was made, or it is not used: what GTest::gmock, threads and protobuf's folder bring.
      target_compile_definitions(${target} PRIVATE GTEST_HAS_PTHREAD=1)
      target_compile_options(${target} PRIVATE -pthread)
      target_include_directories(${target} SYSTEM PRIVATE $<TARGET_PROPERTY:meshfill_proto,INTERFACE_INCLUDE_DIRECTORIES>)
      target_precompile_headers(${target} REUSE_FROM meshfill_precompiled)
    endif()
  endforeach()
  get_property(folders DIRECTORY ${FOLDER} PROPERTY SUBDIRECTORIES)
  foreach(folder IN LISTS folders)
    meshfill_precompile(${folder})
  endforeach()
endfunction()
foreach(folder engine server tests)
  meshfill_precompile(${PROJECT_SOURCE_DIR}/${folder})
endforeach()
