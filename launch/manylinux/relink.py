"""Links a build's objects again, for systems as old as manylinux_2_28: glibc 2.28 and the libstdc++ of g++ 8.

The compiler's own libraries are newer. So the linker sees stubs of them: libraries without code that have the symbols
of those old ones, each in its newest version that is old enough. What they lack comes from libstdc++.a and from
newer_symbols.cpp, hidden in each file, as in Red Hat's gcc-toolset.
"""
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import shlex
import tarfile
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # auditwheel's policy
STUBS = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6")
OWN = ("newer_symbols", "program_start")
# Needed by name: an old system has in these libraries what is in libc.so.6 today.
LINK = ("-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state",
        "-Wl,--exclude-libs,libstdc++.a:libnewer.a,-s")
# Debian's own is too new, and its libyaml-cpp.a is not for shared libraries.
YAML_VERSION, YAML_SONAME = "0.7.0", "libyaml-cpp.so.0.7"
YAML_SOURCE = "pool/main/y/yaml-cpp/yaml-cpp_0.7.0+dfsg.orig.tar.xz"
APT = pathlib.Path("/etc/apt")
YAML_SHA256 = "dc63708605404e0b963e0ca3a9619d1c8270eda2839603e6fa0384e5e51e5312"


class CannotLink(Exception):
    """A sentence for the user."""


def symbols_of(run, library):
    """The symbols that a library has: the newest old enough, {name: (version, kind, size)}, and the names too new."""
    old, names = {}, set()
    for line in run("readelf", "-W", "--dyn-syms", library).splitlines():
        words = line.split()
        name, _, version = words[7].replace("@@", "@").partition("@") if len(words) == 8 else ("", "", "")
        prefix, _, digits = version.partition("_")
        if not re.fullmatch(r"[\d.]+", digits) or words[6] == "UND":
            continue
        names.add(name)
        number = tuple(map(int, digits.split(".")))
        if number <= NEWEST[prefix] and number > old.get(name, ((),))[0]:
            old[name] = (number, version, words[3], int(words[2], 0))
    return {name: rest for name, (_, *rest) in old.items()}, names - old.keys()


def write_stub(run, cxx, original, folder):
    """Returns the names that the stub lacks."""
    symbols, newer = symbols_of(run, original)
    source, versions = [], {}
    for name, (version, kind, size) in sorted(symbols.items()):
        versions.setdefault(version, []).append(name)
        section, kind = {"TLS": (".tbss", "tls_object"), "OBJECT": (".bss", "object")}.get(kind, (".text", "function"))
        source.append(f".section {section}\n.balign 32\n.globl {name}\n.type {name},@{kind}\n.size {name},{size}\n"
                      f"{name}: .skip {max(size, 1)}\n")
    stub = folder / original.name
    pathlib.Path(f"{stub}.s").write_text("".join(source))
    pathlib.Path(f"{stub}.map").write_text("".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n" for version, names in versions.items()))
    cxx("-shared", "-nostdlib", f"-Wl,-soname,{original.name},--version-script={stub}.map", f"{stub}.s", "-o", stub)
    return newer


def write_libraries(run, cxx, folder):
    """The stubs, and linker scripts that stand for the compiler's libraries; returns the names that the stubs lack."""
    def of_compiler(name):
        return pathlib.Path(cxx(f"-print-file-name={name}").strip())

    newer = set().union(*(write_stub(run, cxx, of_compiler(name), folder) for name in STUBS))
    for name in OWN:
        cxx("-std=c++20", "-O2", "-fPIC", "-c", HERE / f"{name}.cpp", "-o", folder / f"{name}.o")
    ours = folder / "libnewer.a"
    run("ar", "rcs", ours, *(folder / f"{name}.o" for name in OWN))
    standard, math, gcc, libc = (folder / name for name in STUBS)
    for name, text in (
            ("libstdc++.so", f"INPUT({standard} {ours} {of_compiler('libstdc++.a')})"), ("libm.so", f"INPUT({math})"),
            ("libgcc_s.so", f"GROUP({gcc} -lgcc)"),
            ("libc.so", f"GROUP({ours} {libc} {of_compiler('libc_nonshared.a')} "
                        f"AS_NEEDED({of_compiler('ld-linux-x86-64.so.2')}))")):
        (folder / name).write_text(text + "\n")
    return newer


def check_names(run, made, newer):
    """A module may leave names to the libraries that load it: none of them may be newer than the stubs."""
    names = {line.split()[-1] for line in run("nm", "-D", "--undefined-only", made).splitlines()} & newer
    if names:
        raise CannotLink(f"{made.name} needs {', '.join(sorted(names))}, which manylinux_2_28 lacks: "
                         "add it to launch/manylinux/newer_symbols.cpp")


def download(path):
    """A file of the Debian archive, from the first of apt's sources that has it. Needs no lists of packages."""
    files = [APT / "sources.list", *sorted((APT / "sources.list.d").glob("*"))]
    places = re.findall(r"https?://\S+", "\n".join(file.read_text() for file in files if file.is_file()))
    errors = []
    for place in dict.fromkeys(places):
        try:
            with urllib.request.urlopen(f"{place.rstrip('/')}/{path}", timeout=60) as answer:
                return answer.read()
        except OSError as error:
            errors.append(f"{place}: {error}")
    raise CannotLink(f"{path} cannot be downloaded: {'; '.join(errors) or f'{APT} names no archive'}")


def build_yaml(run, cxx, libraries, folder):
    """yaml-cpp from its source, into `folder`."""
    installed = run("pkg-config", "--modversion", "yaml-cpp").strip()
    if installed != YAML_VERSION:
        raise CannotLink(f"the build uses yaml-cpp {installed}, and launch/manylinux/relink.py has the source of "
                         f"{YAML_VERSION}: make the wheel on Debian 12, or give relink.py that source")
    packed = download(YAML_SOURCE)
    if hashlib.sha256(packed).hexdigest() != YAML_SHA256:
        raise CannotLink(f"{YAML_SOURCE} is not the file that launch/manylinux/relink.py expects")
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(libraries)
    source, = libraries.glob("yaml-cpp-*")
    made = folder / f"{YAML_SONAME}.{os.getpid()}"
    cxx("-std=c++11", "-O2", "-fPIC", "-shared", f"-I{source}/include", *source.glob("src/**/*.cpp"),
        f"-L{libraries}", *LINK, f"-Wl,-soname,{YAML_SONAME}", "-o", made)
    made.rename(folder / YAML_SONAME)  # whole, or not there


def relink(run, build, scratch, made, yaml):
    """Links what the build installs again, into the folder `made`, and makes yaml-cpp in the folder `yaml` unless it is
    there."""
    installed = [target["filename"][0] for target in json.loads(run("meson", "introspect", "--targets", build))
                 if target["installed"] and target["type"] in ("shared library", "shared module", "executable")]
    files = [pathlib.Path(name).relative_to(build.resolve()) for name in installed]
    commands = [shlex.split(run("ninja", "-C", build, "-t", "commands", "-s", file).splitlines()[-1]) for file in files]
    cxx = functools.partial(run, commands[0][0])
    newer = write_libraries(run, cxx, scratch)
    for file, words in zip(files, commands):
        at = words.index("-o")
        del words[at:at + 2]
        # Before LibTorch, which exports what it has of libstdc++.a itself.
        place = next((at for at, word in enumerate(words) if re.fullmatch(r"[^-].*\.so", word)), len(words))
        words[place:place] = [scratch / "libstdc++.so", scratch / "libm.so", scratch / "libc.so"]
        run(*words, "-o", made / file.name, f"-L{scratch}", *LINK, cwd=build)
        check_names(run, made / file.name, newer)
    if not (yaml / YAML_SONAME).exists():
        build_yaml(run, cxx, scratch, yaml)
