"""launch/examples/*.sh, unchanged: their jobs have the losses of `megashard launch` with as many ranks. So have the
pods of launch/examples/kubernetes, on this machine and with two ranks a node instead of eight."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
import yaml

from megashard import BUILD, PROGRAM, ROOT, environment, free_port, launch, run, write_documents

EXAMPLES = ROOT / "launch" / "examples"
STAND_INS = ROOT / "tests" / "interop" / "job_stand_ins.py"
RANKS = 4
SMALL = ("--seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --min-lr 0 "
         "--lr-decay-style cosine --lr-warmup-iters 1 --eval-iters 0").split()  # the last of two values counts


@pytest.fixture(scope="module", autouse=True)
def work(folder):
    """The folder in which the scripts run: a model, data, and the files of the tree that they name."""
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=64)).save_pretrained(folder / "model")
    write_documents(folder / "data", [torch.randint(0, 64, (100,)).tolist() for _ in range(60)])
    (folder / "build").symlink_to(BUILD)
    (folder / "fsdp2_config.yaml").symlink_to(ROOT / "fsdp2_config.yaml")


def losses_of(folder, *command, metrics, **variables):
    done = run(*command, cwd=folder, env=environment(**variables))
    assert f"over {RANKS} ranks" in done.stdout, done.stdout
    return [json.loads(line)["loss"] for line in (folder / metrics).read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(folder, work):
    losses = losses_of(folder, *launch(RANKS, "pretrain"), "--use-torch-fsdp2", "--fsdp2-config-path",
                       "fsdp2_config.yaml", "--ckpt-format", "torch_dcp", "--hf-model", "model", "--data-path", "data",
                       "--split", "99,1,0", *SMALL, "--metrics-file", "expected.jsonl", metrics="expected.jsonl")
    assert len(losses) == 4 and len(set(losses)) == 4
    return losses


def path_with(folder, *stand_ins):
    """PATH, where those programs come first."""
    folder.mkdir()
    for name in stand_ins:
        (folder / name).symlink_to(STAND_INS)
    return f"{folder}:{os.environ['PATH']}"


def test_slurm(folder, expected, tmp_path):
    """Two nodes. sbatch's arguments override the script's."""
    path = path_with(tmp_path / "bin", "sbatch", "srun", "scontrol")
    losses = losses_of(folder, "sbatch", "--ntasks-per-node=2", "--cpus-per-task=1", EXAMPLES / "slurm.sh", *SMALL,
                       metrics="checkpoints/run.jsonl", MODEL="model", DATA="data", PATH=path)
    assert losses == expected
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"


def real_mpirun():
    return shutil.which("mpirun") and "Open MPI" in run("mpirun", "--version", expect=None).stdout


@pytest.mark.parametrize("hosts", [{}, {"HOSTS": f"localhost:{RANKS}"}], ids=["this_host", "named_host"])
def test_mpirun(folder, expected, tmp_path, hosts):
    real = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1"}  # ranks may be more than cores
    variables = real if real_mpirun() else {"PATH": path_with(tmp_path / "bin", "mpirun")}
    losses = losses_of(folder, EXAMPLES / "mpirun.sh", "model", "data", *SMALL, "--metrics-file", tmp_path / "m.jsonl",
                       metrics=tmp_path / "m.jsonl", RANKS=str(RANKS), **variables, **hosts)
    assert losses == expected


def test_torchrun(folder, expected, tmp_path):
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    losses = losses_of(folder, EXAMPLES / "torchrun.sh", "model", "data", *SMALL, "--metrics-file",
                       tmp_path / "m.jsonl", metrics=tmp_path / "m.jsonl", RANKS=str(RANKS), PATH=path)
    assert losses == expected


JOBSET, PYTORCHJOB = ((EXAMPLES / "kubernetes" / name).read_text() for name in ("jobset.yaml", "pytorchjob.yaml"))


def test_kubernetes_manifests_fit_the_schemas_of_their_kinds():
    """Whatever the models of the kinds do not know would be missing behind them."""
    import kubeflow.training
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    jobset, job = yaml.safe_load(JOBSET), yaml.safe_load(PYTORCHJOB)
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    client = kubeflow.training.ApiClient()
    answer = type("Answer", (), {"data": json.dumps(job)})
    assert client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob")) == job


def losses_of_pods(folder, data, templates, variables):
    """Each template's container runs its command with those variables of its pod."""
    data.mkdir()
    for name, target in ("model", "model"), ("tokens.bin", "data.bin"), ("tokens.idx", "data.idx"):
        (data / name).symlink_to(folder / target)
    path = path_with(data / "bin")
    (data / "bin" / "megashard").symlink_to(PROGRAM)
    (data / "bin" / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (data / "bin" / "torchrun").chmod(0o755)
    pods = []
    for template, of_pod in zip(templates, variables, strict=True):
        container, = template["spec"]["containers"]
        words = [word.replace("/data/", f"{data}/") for word in container["command"] + container["args"]]
        pods.append(subprocess.Popen([*words, *SMALL], cwd=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     text=True, env=environment(PATH=path, **of_pod)))
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    return [json.loads(line)["loss"] for line in (data / "save" / "metrics.jsonl").read_text().splitlines()]


def test_pods_of_a_jobset(folder, expected, tmp_path):
    text = JOBSET
    for theirs, here in (("--nproc-per-node 8", "--nproc-per-node 2"), ("--master-port 29500",
                         f"--master-port {free_port()}"), ("megashard-node-0-0.megashard", "127.0.0.1")):
        assert text.count(theirs) == 1  # by the schema's words {jobset}-{replicated job}-{job}-{pod}.{jobset}
        text = text.replace(theirs, here)
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 2
    assert losses_of_pods(folder, tmp_path / "data", [job["template"]] * 2,
                          [{"JOB_COMPLETION_INDEX": str(index)} for index in range(2)]) == expected


def test_pods_of_a_pytorchjob(folder, expected, tmp_path):
    replicas = yaml.safe_load(PYTORCHJOB)["spec"]["pytorchReplicaSpecs"]
    address, port = "127.0.0.1", free_port()
    given = [{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": address,
              "PET_MASTER_PORT": port, "MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "4",
              "RANK": str(index)} for index in range(2)]
    assert [replicas[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
    assert losses_of_pods(folder, tmp_path / "data", [replicas[kind]["template"] for kind in ("Master", "Worker")],
                          given) == expected
