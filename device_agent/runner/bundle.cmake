# Included with -DMOBIZO_BUNDLE=ON: PLACE then needs nothing of the device but its kernel.
#
#   mobizo-runner         a static launcher (launcher.cpp)
#   bin/mobizo-runner     the runner
#   lib/                  the loader, the C and C++ libraries, and ExecuTorch's libraries
#   licenses/             the licences of all of these, and where their sources are
set(loader ld-linux-aarch64.so.1)
set(documents /usr/share/doc) # of Debian's packages, from which the libraries come
set(texts /usr/share/common-licenses)

foreach(name ${loader} libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 libgcc_s.so.1 libstdc++.so.6)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}
                  OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT EXISTS ${path})
    message(FATAL_ERROR "error: ${CMAKE_CXX_COMPILER} has no ${name}: apt install libc6-dev-arm64-cross")
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

execute_process(COMMAND dpkg-query --show --showformat "  \${Package} \${Version}, built from \${Built-Using}\\n"
                        libc6-arm64-cross libstdc++6-arm64-cross libgcc-s1-arm64-cross
                OUTPUT_VARIABLE packages COMMAND_ERROR_IS_FATAL ANY)
configure_file(${CMAKE_CURRENT_LIST_DIR}/notice.txt ${CMAKE_CURRENT_BINARY_DIR}/notice.txt @ONLY)
set(executorch_license ${EXECUTORCH_ROOT}/../executorch-${executorch_VERSION}.dist-info/licenses/LICENSE)
set(licenses ${documents}/libc6-arm64-cross/copyright glibc.txt
             ${documents}/libstdc++6-arm64-cross/copyright gcc.txt
             ${texts}/LGPL-2.1 LGPL-2.1.txt
             ${texts}/GPL-3 GPL-3.txt
             ${texts}/Apache-2.0 Apache-2.0.txt
             ${executorch_license} executorch.txt
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
