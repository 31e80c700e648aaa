# Included with -DMOBIZO_BUNDLE=ON: PLACE then needs nothing of the device but its kernel.
#
#   mobizo-runner         a static launcher (launcher.cpp)
#   bin/mobizo-runner     the runner
#   lib/                  the loader, the C and C++ libraries, and ExecuTorch's libraries
#   licenses/             the licences of all of these, and where their sources are
#
# The libraries and their licences come from packages of Debian or Ubuntu.
if(CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  set(loader ld-linux-x86-64.so.2)
elseif(CMAKE_SYSTEM_PROCESSOR STREQUAL aarch64)
  set(loader ld-linux-aarch64.so.1)
else()
  message(FATAL_ERROR "error: no bundle is made for ${CMAKE_SYSTEM_PROCESSOR}, only for x86_64 and aarch64")
endif()
set(libc_package libc6)
set(libstdcxx_package libstdc++6)
set(libgcc_package libgcc-s1)
if(CMAKE_CROSSCOMPILING)
  foreach(name libc_package libstdcxx_package libgcc_package)
    string(APPEND ${name} -arm64-cross)
  endforeach()
endif()
set(documents /usr/share/doc) # of the packages
set(texts /usr/share/common-licenses)

foreach(name ${loader} libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 libgcc_s.so.1 libstdc++.so.6)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}
                  OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT EXISTS ${path})
    message(FATAL_ERROR "error: ${CMAKE_CXX_COMPILER} has no ${name}: install ${libc_package} and ${libstdcxx_package}")
  endif()
  file(REAL_PATH ${path} path)
  install(PROGRAMS ${path} DESTINATION lib RENAME ${name})
endforeach()

set_target_properties(mobizo-runner PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
install(TARGETS mobizo-runner RUNTIME DESTINATION bin)

add_executable(launcher launcher.cpp)
target_compile_definitions(launcher PRIVATE MOBIZO_LOADER="${loader}")
target_compile_options(launcher PRIVATE -Wall -Wextra)
target_link_options(launcher PRIVATE -static)
set_target_properties(launcher PROPERTIES OUTPUT_NAME mobizo-runner RUNTIME_OUTPUT_DIRECTORY launcher)
install(TARGETS launcher RUNTIME DESTINATION .)

find_program(dpkg_query dpkg-query REQUIRED)
execute_process(COMMAND ${dpkg_query} --show --showformat
                        "  \${Package} \${Version} (source: \${source:Package} \${source:Version}; \${Built-Using})\\n"
                        ${libc_package} ${libstdcxx_package} ${libgcc_package}
                OUTPUT_VARIABLE packages COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "; )" ")" packages "${packages}") # packages of this machine were built using no other package
cmake_host_system_information(RESULT distribution QUERY DISTRIB_PRETTY_NAME)
configure_file(${CMAKE_CURRENT_LIST_DIR}/notice.txt ${CMAKE_CURRENT_BINARY_DIR}/notice.txt @ONLY)
set(executorch_license ${EXECUTORCH_ROOT}/../executorch-${executorch_VERSION}.dist-info/licenses/LICENSE)
set(licenses ${documents}/${libc_package}/copyright glibc.txt
             ${documents}/${libstdcxx_package}/copyright gcc.txt
             ${texts}/LGPL-2.1 LGPL-2.1.txt
             ${texts}/GPL-3 GPL-3.txt
             ${texts}/Apache-2.0 Apache-2.0.txt
             ${executorch_license} executorch.txt
             ${CMAKE_CURRENT_LIST_DIR}/../../LICENSE mobizo.txt
             ${CMAKE_CURRENT_BINARY_DIR}/notice.txt NOTICE.txt)
while(licenses)
  list(POP_FRONT licenses from name)
  if(NOT EXISTS ${from})
    message(FATAL_ERROR "error: ${from} is missing, and the bundle must carry it")
  endif()
  file(REAL_PATH ${from} from)
  install(FILES ${from} DESTINATION licenses RENAME ${name})
endwhile()

# The install's --strip strips what was built here; these come from packages.
install(CODE "
  if(CMAKE_INSTALL_DO_STRIP)
    file(GLOB copied \"\${CMAKE_INSTALL_PREFIX}/lib/*\")
    execute_process(COMMAND ${CMAKE_STRIP} --strip-unneeded \${copied} COMMAND_ERROR_IS_FATAL ANY)
  endif()")
