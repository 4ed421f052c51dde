// Defines or redirects symbols that today's compilers would take from new versions of libstdc++ and glibc, so
// that the library loads with glibc 2.28 and the libstdc++ of GCC 8 (manylinux_2_28).
#define _GLIBCXX_EXTERN_TEMPLATE 0  // the constructors below are instantiated here, not taken from libstdc++
#include <cmath>
#include <new>
#include <sstream>

#define DFGNN_HIDDEN __attribute__((visibility("hidden")))

// Comments behind symbols: the version with which libstdc++ has introduced them.
#if defined(__GLIBCXX__)
template DFGNN_HIDDEN std::basic_ostringstream<char>::basic_ostringstream();  // GLIBCXX_3.4.26
template DFGNN_HIDDEN std::basic_stringstream<char>::basic_stringstream();

namespace std {
// Weak, because with -static-libstdc++ the archive's member that defines it is linked, too, for its
// neighbours.
__attribute__((weak)) void __throw_bad_array_new_length() {  // GLIBCXX_3.4.29
  throw std::bad_array_new_length();
}
}  // namespace std
#endif

extern "C" {
#if defined(__GLIBC__)
// A variable of glibc since GLIBC_2.32, by which libstdc++ knows of threads. With 0 it counts references
// atomically, which is right for any number of threads.
DFGNN_HIDDEN char __libc_single_threaded = 0;

// GLIBC_2.29 has a new version of log, without the old error handling. The linker's option --wrap=log
// redirects calls of log to __wrap_log below, which calls the old version, and names log itself __real_log.
#if defined(__x86_64__)
__asm__(".symver dfgnn_log, log@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dfgnn_log, log@GLIBC_2.17");
#else
#define dfgnn_log __real_log
#endif
#else
#define dfgnn_log __real_log
#endif
double dfgnn_log(double);
DFGNN_HIDDEN double __wrap_log(double x) { return dfgnn_log(x); }
}
