// The start of the wheel's program on glibc before 2.34, whose __libc_start_main leaves the program's constructors to a
// function that it is given; the startup code of newer ones gives none.

using Constructor = void (*)(int, char**, char**);

extern "C" {

extern const Constructor __init_array_start[], __init_array_end[];  // by the linker

int start_of_libc(int (*main)(int, char**, char**), int argc, char** argv, Constructor init, void (*fini)(),
                  void (*loader_fini)(), void* stack_end);
__asm__(".symver start_of_libc, __libc_start_main@GLIBC_2.2.5");

static void construct(int argc, char** argv, char** environment) {
  for (const Constructor* each = __init_array_start; each != __init_array_end; ++each) (*each)(argc, argv, environment);
}

int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, Constructor, void (*)(),
                      void (*loader_fini)(), void* stack_end) {
  return start_of_libc(main, argc, argv, construct, nullptr, loader_fini, stack_end);
}

}  // extern "C"
