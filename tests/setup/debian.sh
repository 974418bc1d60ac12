#!/usr/bin/env bash
# Installs from Debian or Ubuntu what the tests use besides cargo, gcc and python3, when it is missing and the caller is
# root; otherwise prints what is missing and continues: the tests that need it fail and name it. With an argument, what that
# recipe needs besides: `cross` runs programs of another machine, `newcomer` makes a system in a folder, `compose` starts a
# container engine and Prometheus, `slurm` starts a cluster of Slurm, `spark` starts one of Spark, `page` drives a browser.
set -euo pipefail

declare -A packages=([ip]=iproute2 [tc]=iproute2 [tcpdump]=tcpdump [openssl]=openssl [git]=git [ssh]=openssh-client
    [sshd]=openssh-server [node]=nodejs [clang]=clang [wasm-ld]=lld [ethtool]=ethtool
    [faketime]=faketime)
case "${1:-}" in
cross) packages[qemu-aarch64-static]=qemu-user-static ;;
newcomer) packages[debootstrap]=debootstrap ;;
slurm) packages+=([slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge) ;;
spark) packages[java]=openjdk-17-jre-headless ;;
page) packages+=([chromium]=chromium [chromedriver]=chromium-driver) ;;
compose)
    # An engine that answers is used as it is; else one is started, by root only.
    if ! docker version >/dev/null 2>&1; then
        packages+=([dockerd]=docker.io [docker-compose]=docker-compose [debootstrap]=debootstrap)
    fi
    packages+=([iptables]=iptables [nsenter]=util-linux [prometheus]=prometheus)
    ;;
esac
missing=()
[ "${1:-}" != cross ] || [ -d /usr/aarch64-linux-gnu/lib ] || missing+=(libc6-arm64-cross)
# The keys that sign both distributions' releases, for a system of the other one: where apt has a package of them.
has_candidate() {
    command -v apt-cache >/dev/null && [[ $(LC_ALL=C apt-cache policy "$1") =~ Candidate:\ [0-9] ]]
}
if [ "${1:-}" = newcomer ]; then
    for owner in debian:debian-archive-keyring ubuntu:ubuntu-keyring; do
        [ -e "/usr/share/keyrings/${owner%:*}-archive-keyring.gpg" ] || ! has_candidate "${owner#*:}" || missing+=("${owner#*:}")
    done
fi
for command in "${!packages[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || missing+=("${packages[$command]}")
done
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
[ ${#missing[@]} -gt 0 ] || exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need packages that are not installed here: ${missing[*]}" >&2
    echo "On Debian and Ubuntu: sudo apt-get install ${missing[*]}" >&2
    exit 0
fi
echo "installing from the distribution: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
"${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}" >/dev/null; }
