//! Environments as launchers made them: those of torchrun (PyTorch 2.15), mpirun (Open MPI 5.0.11), prterun, mpiexec (MPICH 5.0.2
//! and Intel MPI 2021.19) and srun, sbatch and salloc (Slurm 22.05.8) are recorded; those of jsrun, horovodrun, Kubeflow and
//! indexed Jobs follow their documentation.

use super::*;

fn detect(environment: &[(&str, &str)]) -> Option<LaunchedBy> {
    let value = |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    LaunchedBy::detect(value)
}

/// Launcher, size, rank, local size, local rank.
type Numbers = (Launcher, Option<u32>, Option<u32>, Option<u32>, Option<u32>);

fn numbers(environment: &[(&str, &str)]) -> Option<Numbers> {
    let found = detect(environment)?;
    Some((found.launcher, found.size, found.rank, found.local_size, found.local_rank))
}

const TORCHRUN: &[(&str, &str)] = &[
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "36197"),
    ("RANK", "3"),
    ("ROLE_WORLD_SIZE", "4"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_RUN_ID", "c466d441"),
    ("WORLD_SIZE", "4"),
];
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_NODE_RANK", "1"),
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_UNIVERSE_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-vm-25130@1"),
    ("PMIX_RANK", "1"),
    ("PRTE_LAUNCHED", "1"),
];
const PRTERUN: &[(&str, &str)] = &[
    ("PMIX_NAMESPACE", "prterun-vm-25141@1"),
    ("PMIX_RANK", "0"),
    ("PRTE_LAUNCHED", "1"),
    ("PMIX_VERSION", "5.0.11rc1"),
];
const MPICH: &[(&str, &str)] = &[
    ("HYDI_CONTROL_FD", "7"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "11"),
    ("PMI_HOSTNAME", "vm"),
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
];
const INTEL_MPI: &[(&str, &str)] = &[
    ("HYDRA_BSTRAP_LAUNCHER", "ssh"),
    ("I_MPI_HYDRA_UUID", "20620000-3e85-d57c-1061-06001fe7f538"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "0"),
    ("PMI_FD", "9"),
    ("PMI_RANK", "0"),
    ("PMI_SIZE", "2"),
];
const SRUN: &[(&str, &str)] = &[
    ("SLURM_GTIDS", "0,1"),
    ("SLURM_JOB_ID", "1"),
    ("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NPROCS", "2"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "1"),
    ("SLURM_STEPID", "0"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "vm"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "2"),
];
const SBATCH: &[(&str, &str)] = &[
    ("SLURM_GTIDS", "0"),
    ("SLURM_JOB_ID", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NPROCS", "2"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_TASKS_PER_NODE", "2"),
];
/// Where salloc starts no step for the shell, there is no SLURM_PROCID either.
const SALLOC: &[(&str, &str)] =
    &[("SLURM_JOB_ID", "3"), ("SLURM_NPROCS", "2"), ("SLURM_NTASKS", "2"), ("SLURM_TASKS_PER_NODE", "2")];
const SALLOC_INTERACTIVE_STEP: &[(&str, &str)] = &[
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEPID", "4294967290"),
    ("SLURM_STEP_ID", "4294967290"),
    ("SLURM_STEP_NUM_TASKS", "1"),
];
const JSRUN: &[(&str, &str)] = &[
    ("JSM_NAMESPACE_LOCAL_RANK", "0"),
    ("JSM_NAMESPACE_LOCAL_SIZE", "6"),
    ("JSM_NAMESPACE_RANK", "6"),
    ("JSM_NAMESPACE_SIZE", "12"),
    ("LSB_JOBID", "77"),
    ("OMPI_COMM_WORLD_RANK", "6"),
    ("OMPI_COMM_WORLD_SIZE", "12"),
    ("PMIX_NAMESPACE", "1"),
    ("PMIX_RANK", "6"),
];
const HOROVODRUN: &[(&str, &str)] = &[
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"),
    ("HOROVOD_LOCAL_RANK", "0"),
    ("HOROVOD_LOCAL_SIZE", "1"),
    ("HOROVOD_RANK", "1"),
    ("HOROVOD_SIZE", "2"),
];

#[test]
fn recorded_environments_are_detected() {
    for (environment, launcher, size, rank, local_size, local_rank) in [
        (TORCHRUN, Launcher::Torchrun, Some(4), Some(3), Some(2), Some(1)),
        (OPEN_MPI, Launcher::OpenMpi, Some(2), Some(1), Some(2), Some(1)),
        (PRTERUN, Launcher::Pmix, None, Some(0), None, None),
        (MPICH, Launcher::Hydra, Some(4), Some(3), Some(2), Some(1)),
        (INTEL_MPI, Launcher::Hydra, Some(2), Some(0), Some(2), Some(0)),
        (SRUN, Launcher::Srun, Some(2), Some(1), Some(2), Some(1)),
        (JSRUN, Launcher::Jsrun, Some(12), Some(6), Some(6), Some(0)),
        (HOROVODRUN, Launcher::Horovod, Some(2), Some(1), Some(1), Some(0)),
    ] {
        assert_eq!(numbers(environment), Some((launcher, size, rank, local_size, local_rank)));
        let found = detect(environment).expect("it is there");
        assert!(found.is_one_of_several());
        for (name, value) in &found.variables {
            assert!(environment.contains(&(*name, value.as_str())), "{name}={value} was not given");
        }
    }
}

#[test]
fn the_shell_of_an_allocation_is_one_process() {
    assert_eq!(detect(SBATCH), None);
    assert_eq!(detect(SALLOC), None);
    let found = detect(SALLOC_INTERACTIVE_STEP).expect("it is a step");
    assert_eq!((found.launcher, found.size, found.is_one_of_several()), (Launcher::Srun, Some(1), false));
}

#[test]
fn the_innermost_launcher_counts() {
    let inside = |outer: &[(&'static str, &'static str)], inner: &[(&'static str, &'static str)]| {
        let both: Vec<_> = outer.iter().chain(inner).copied().collect();
        detect(&both).map(|found| found.launcher)
    };
    assert_eq!(inside(SRUN, TORCHRUN), Some(Launcher::Torchrun));
    assert_eq!(inside(OPEN_MPI, TORCHRUN), Some(Launcher::Torchrun));
    assert_eq!(inside(SRUN, OPEN_MPI), Some(Launcher::OpenMpi));
    assert_eq!(inside(SRUN, MPICH), Some(Launcher::Hydra));
    assert_eq!(inside(SRUN, HOROVODRUN), Some(Launcher::Horovod));
    assert_eq!(inside(HOROVODRUN, OPEN_MPI), Some(Launcher::OpenMpi));
    // `ronde run` sets the variables of Horovod and of torch.distributed, too.
    let ronde = [("RONDE_SIZE", "2"), ("HOROVOD_SIZE", "2"), ("HOROVOD_RANK", "1"), ("WORLD_SIZE", "2")];
    assert_eq!(inside(SRUN, &ronde), Some(Launcher::Ronde));
    // srun --mpi=pmi2 and --mpi=pmix.
    assert_eq!(inside(SRUN, &[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "11")]), Some(Launcher::Srun));
    assert_eq!(inside(SRUN, &[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "slurm.pmix.1.0")]), Some(Launcher::Srun));
    // Programs of mpirun often set these for torch.distributed.
    assert_eq!(inside(OPEN_MPI, &[("WORLD_SIZE", "2"), ("RANK", "1")]), Some(Launcher::OpenMpi));
}

#[test]
fn kubernetes_variables_are_detected() {
    let job = [("MASTER_ADDR", "trainer-0"), ("RANK", "1"), ("WORLD_SIZE", "2")];
    assert_eq!(numbers(&job), Some((Launcher::TorchEnvironment, Some(2), Some(1), None, None)));
    let pet = [("PET_NNODES", "1:4"), ("PET_NPROC_PER_NODE", "auto"), ("PET_NODE_RANK", "2")];
    assert_eq!(numbers(&pet), Some((Launcher::TorchrunOptions, Some(4), Some(2), None, None)));
    let one = detect(&[("PET_NNODES", "1"), ("PET_NPROC_PER_NODE", "4")]).expect("it is there");
    assert!(!one.is_one_of_several());
}

#[test]
fn a_single_process_and_an_empty_environment_are_not_one_of_several() {
    assert_eq!(detect(&[]), None);
    assert_eq!(detect(&[("WORLD_SIZE", ""), ("RANK", "0")]), None, "an empty variable counts as not set");
    for environment in [
        [("WORLD_SIZE", "1"), ("RANK", "0")],
        [("PMI_SIZE", "1"), ("PMI_RANK", "0")],
        [("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")],
        [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")],
    ] {
        let environment: Vec<_> = environment.into_iter().chain([("SLURM_STEP_NUM_TASKS", "1")]).collect();
        assert!(!detect(&environment).expect("it is there").is_one_of_several(), "{environment:?}");
    }
}

#[test]
fn a_size_that_is_missing_or_no_number_counts_as_several() {
    for environment in [
        [("WORLD_SIZE", "four"), ("RANK", "0")],
        [("PMI_RANK", "0"), ("MPI_LOCALNRANKS", "1")],
        [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")],
    ] {
        let found = detect(&environment).expect("it is there");
        assert!(found.size.is_none() && found.is_one_of_several(), "{environment:?}");
        assert!(found.refusal().contains("ronde run -np N COMMAND"));
    }
}

#[test]
fn a_refusal_names_the_variables_and_the_remedy() {
    let text = detect(TORCHRUN).expect("it is there").refusal();
    let parts = [
        "torchrun has started this process as one of 4 (WORLD_SIZE=4, RANK=3, LOCAL_WORLD_SIZE=2, LOCAL_RANK=1, \
         TORCHELASTIC_RUN_ID=c466d441), but there is no job of ronde",
        "Nothing was started, because each of these processes would be a job of one rank and train alone",
        "`ronde run -np 4 COMMAND`",
        "`ronde sidecar`",
        "`ronde run -np 1 COMMAND`",
    ];
    for part in parts {
        assert!(text.contains(part), "{text}\nlacks\n{part}");
    }
    let pmix = detect(PRTERUN).expect("it is there").to_string();
    assert_eq!(
        pmix,
        "a launcher that speaks PMIx (such as prterun) has started this process as one of several (PMIX_RANK=0, \
         PMIX_NAMESPACE=prterun-vm-25141@1)"
    );
}

#[test]
fn every_launcher_has_one_row_and_one_name() {
    let mut names: Vec<&str> = TABLE.iter().map(|row| row.launcher.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
}

/// Node, number of nodes, job, restarts.
type Place = (Option<u32>, Option<u32>, Option<String>, u32);

fn place(environment: &[(&str, &str)]) -> Place {
    let found = detect(environment).expect("it is there");
    (found.node, found.nodes, found.job, found.restarts)
}

#[test]
fn hosts_and_job_are_read() {
    let job = |text: &str| Some(text.to_owned());
    let torchrun = job("TORCHELASTIC_RUN_ID=c466d441 MASTER_ADDR=localhost MASTER_PORT=36197");
    assert_eq!(place(TORCHRUN), (Some(1), Some(2), torchrun, 2));
    assert_eq!(place(OPEN_MPI), (None, None, job("PMIX_NAMESPACE=prterun-vm-25130@1"), 0));
    assert_eq!(place(MPICH), (None, None, None, 0), "Hydra passes no ID");
    assert_eq!(place(INTEL_MPI).2, job("I_MPI_HYDRA_UUID=20620000-3e85-d57c-1061-06001fe7f538"));
    assert_eq!(place(SRUN), (Some(0), Some(1), job("SLURM_JOB_ID=1 SLURM_STEP_ID=0"), 0));
    assert_eq!(place(JSRUN).2, job("LSB_JOBID=77 PMIX_NAMESPACE=1"));
    assert_eq!(detect(SRUN).expect("it is there").hosts, Some(vec!["vm".to_owned()]));
    assert_eq!(detect(TORCHRUN).expect("it is there").hosts, None);
    assert_eq!(detect(MPICH).expect("it is there").rank_variable, Some("PMI_RANK"));
}

#[test]
fn a_step_of_several_nodes_has_local_sizes() {
    let step = |node: &'static str| {
        let environment = [
            ("SLURM_STEP_ID", "3"),
            ("SLURM_PROCID", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", node),
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_STEP_NUM_NODES", "4"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
            ("SLURM_STEP_NODELIST", "gpu[08-10,12]"),
        ];
        detect(&environment).expect("it is there")
    };
    assert_eq!((step("2").local_size, step("3").local_size, step("4").local_size), (Some(2), Some(1), None));
    assert!(!step("2").is_on_one_host());
    assert_eq!(step("0").hosts.expect("they are named").join(" "), "gpu08 gpu09 gpu10 gpu12");
}

#[test]
fn the_launchers_of_one_host_are_known() {
    let is_on_one_host = |environment: &[(&str, &str)]| detect(environment).expect("it is there").is_on_one_host();
    assert!([OPEN_MPI, INTEL_MPI, SRUN].into_iter().all(is_on_one_host));
    assert!(![TORCHRUN, PRTERUN, MPICH, JSRUN, HOROVODRUN].into_iter().any(is_on_one_host));
    let by_hand = |address: &'static str| [("MASTER_ADDR", address), ("RANK", "1"), ("WORLD_SIZE", "2")];
    for (address, is_here) in
        [("localhost", true), ("127.0.0.1", true), ("::1", true), ("10.0.0.1", false), ("alpha", false)]
    {
        assert_eq!(is_on_one_host(&by_hand(address)), is_here, "{address}");
    }
    let found = detect(&by_hand("127.0.0.1")).expect("it is there");
    assert_eq!((found.local_rank, found.local_size, found.node), (Some(1), Some(2), Some(0)));
}

#[test]
fn a_pod_of_an_indexed_job_knows_its_rank_alone() {
    let pod = [("JOB_COMPLETION_INDEX", "3"), ("JOBSET_NAME", "train"), ("HOSTNAME", "train-workers-0-3")];
    assert_eq!(numbers(&pod), Some((Launcher::IndexedJob, None, Some(3), None, None)));
    let found = detect(&pod).expect("it is there");
    assert!(found.is_one_of_several() && !found.is_on_one_host());
    let sized: Vec<_> = pod.into_iter().chain([("WORLD_SIZE", "4"), ("RANK", "3")]).collect();
    assert_eq!(numbers(&sized), Some((Launcher::TorchEnvironment, Some(4), Some(3), None, None)));
}
